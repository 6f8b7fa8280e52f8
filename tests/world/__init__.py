"""The deterministic world: the real cores under a virtual clock, a seeded network and seeded faults."""
