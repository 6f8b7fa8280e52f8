"""Simulation: the cores that serve, under a virtual clock, with service times in place of tensors."""
