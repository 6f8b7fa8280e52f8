"""What else the machine did while steps were measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from twinpool.planner.profile.saved import Noise


class Watch:
    """Adds up what all cores did within its contexts; `own_cpu_s` gives the seconds of CPU that measuring has used."""

    def __init__(self, own_cpu_s: Callable[[], float]) -> None:
        self._own_cpu_s = own_cpu_s
        self._total_s = self._others_s = self._stolen_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What happens meanwhile counts."""
        started, own_s, before = time.monotonic(), self._own_cpu_s(), psutil.cpu_times()
        try:
            yield
        finally:
            after = psutil.cpu_times()
            busy_s = sum(getattr(after, name) - getattr(before, name) for name in ("user", "system", "nice"))
            self._total_s += (time.monotonic() - started) * (psutil.cpu_count() or 1)
            self._others_s += max(0.0, busy_s - (self._own_cpu_s() - own_s))
            self._stolen_s += getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)

    def noise(self, spread: float) -> Noise:
        """As shares of all cores. `spread` is that of the steps' repetitions."""
        total_s = max(self._total_s, 1e-9)
        return Noise(self._others_s / total_s, self._stolen_s / total_s, os.getloadavg()[0], spread)
