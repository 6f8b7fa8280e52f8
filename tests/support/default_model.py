"""The built-in model for tests, where `make setup` or `twinpool fetch` has put it."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.engine.default_model import CACHE_KEY
from twinpool.engine.model_cache import entry_path


def default_model_dir() -> Path:
    """Its directory; skips the test if it is not there, because no test fetches from the network."""
    entry = entry_path(CACHE_KEY)
    if not entry.is_dir():
        pytest.skip(f"the default model is not in {entry.parent}; `twinpool fetch` makes this run")
    return entry
