"""Which layout serves some traffic within its objectives, at what cost: bounds in closed form, then simulations."""
