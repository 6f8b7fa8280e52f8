"""Measuring: `token_budget` finds the size of a prefill chunk. Load generator and comparison are still to come."""
