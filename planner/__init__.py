"""Planning pool ratios: profile a worker, fit a latency model, simulate the same cores, recommend. Nothing here yet."""
