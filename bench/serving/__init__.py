"""Load on any OpenAI-compatible server, and what its clients saw.

`workload` says what is sent, `record` what came back; everything between and behind them is built on these two.
"""
