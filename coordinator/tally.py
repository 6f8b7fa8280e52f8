"""What the coordinator counts and times. Plain numbers: `exposition` turns them into Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from twinpool.config import Role
from twinpool.metrics import CoordinatorMetric, Timing

_FAST_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
_SLOW_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

_FAST = (Timing.ITL, Timing.PREDICTION_ERROR)
MAX_GONE_NAMES = 256
OTHERS = "(others)"
"""No worker has this name: parentheses are not allowed in one."""


class Histogram:
    """How often a duration fell between bounds. `counts[i]` are those up to `bounds_s[i]`; the last has none."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Counts a duration, so many times."""
        self.counts[bisect_left(self.bounds_s, seconds)] += count
        self.total_s += seconds * count

    def observe_gaps(self, times: Sequence[float], since: float, count: int) -> None:
        """Counts the durations between neighbours in `since` and `times`, each so many times."""
        counts, bounds_s, total_s = self.counts, self.bounds_s, self.total_s
        for at in times:
            seconds = at - since
            counts[bisect_left(bounds_s, seconds)] += count
            total_s += seconds * count
            since = at
        self.total_s = total_s


class Tally:
    """Counters by metric and label, histograms, and the last word of workers that are gone."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[CoordinatorMetric, str]] = Counter()
        self.timings = {t: Histogram(_FAST_S if t in _FAST else _SLOW_S) for t in Timing}
        self.gone_workers: dict[tuple[str, Role], Counter[str]] = {}
        """Sums of the counters of past processes, by (worker id, role): a restart makes no counter fall. Of names
        that were not seen for longest, beyond `MAX_GONE_NAMES`, one sum per role is kept, as `OTHERS`.
        """

    def add(self, metric: CoordinatorMetric, label: str = "", amount: int = 1) -> None:
        """Counts; `label` is the value of the metric's one label, if it has one."""
        self._counts[metric, label] += amount

    def count(self, metric: CoordinatorMetric, label: str = "") -> int:
        """The count of one label value."""
        return self._counts[metric, label]

    def counts(self, metric: CoordinatorMetric) -> dict[str, int]:
        """The counts by label value."""
        return {label: n for (m, label), n in self._counts.items() if m is metric}

    def retire_worker(self, worker_id: str, role: Role, counters: dict[str, float]) -> None:
        """The process is gone; these were its counters."""
        sums = self.gone_workers.pop((worker_id, role), Counter())
        sums.update(counters)
        self.gone_workers[worker_id, role] = sums
        names = [key for key in self.gone_workers if key[0] != OTHERS]
        if len(names) > MAX_GONE_NAMES:
            oldest = names[0]
            others = self.gone_workers.setdefault((OTHERS, oldest[1]), Counter())
            others.update(self.gone_workers.pop(oldest))
