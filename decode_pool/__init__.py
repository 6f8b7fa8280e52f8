"""The decode pool: takes KV that prefill computed, and generates token by token in one batch."""
