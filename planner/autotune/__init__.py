"""Live tuning of the pools: recommendations from the last minutes' traffic and the simulator, and what came of them."""
