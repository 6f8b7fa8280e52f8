"""Twinpool: an LLM server with prefill and decode on two separate pools of workers."""

__version__ = "0.1.0"
