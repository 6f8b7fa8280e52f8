"""Measuring a server over HTTP, like any client: arrivals, traces, metrics, comparison. Nothing here yet."""
