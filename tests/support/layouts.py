"""The ways of running the default model that oracle tests compare, each a server that all test files share."""

from __future__ import annotations

import pytest

LAYOUTS = {
    "colocated": ("--colocated", "1"),
    "colocated-chunks-of-61": ("--colocated", "1", "--token-budget", "61"),
    "split-shm": ("--transport", "shm", "--strict"),
    "split-tcp-chunks-of-37": ("--transport", "tcp", "--token-budget", "37", "--strict"),
    "split-ucx-chunks-of-100": ("--transport", "ucx", "--token-budget", "100", "--strict"),
}
HYBRID = {"hybrid": ("--hybrid", "--itl-budget", "2000", "--transport", "shm")}


def over(*layouts: str) -> pytest.MarkDecorator:
    """Runs a test on a server of each of these layouts, as its `server`; tests of one layout share it."""
    return pytest.mark.parametrize("server", layouts, indirect=True)
