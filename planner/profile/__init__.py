"""Profiles: what this machine's worker takes, measured through its engine, and the latency model fitted to that."""
