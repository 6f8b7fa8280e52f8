"""Steps on a CUDA device: inputs in one copy, decode steps as graphs, layers handed over by events."""
