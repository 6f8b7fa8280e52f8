"""The prefill pool: computes prompts in chunks, samples the first token, and hands the KV to decode."""
