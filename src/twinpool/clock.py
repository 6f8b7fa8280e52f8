"""Time, as a value that shells read and cores are given."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow. Values of two processes are never compared."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class MonotonicClock:
    """The process's own monotonic clock."""

    def now(self) -> float:
        return time.monotonic()
