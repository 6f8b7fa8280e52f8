"""Which worker is hurt when and how: an endless schedule, the same one for the same seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

MOST_ENDS = 4
ENDS_WINDOW_S = 120.0
"""`twinpool serve` gives a worker up that ends more than five times in two minutes. That is another promise than those
that are proved with these faults, so no worker is ended more than `MOST_ENDS` times within that window."""


class FaultKind(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL, in the middle of whatever it does."""
    RESTART = "restart"
    """SIGTERM: it may say goodbye."""
    FREEZE = "freeze"
    """SIGSTOP for less than a lease: nobody may notice more than a pause."""
    FREEZE_LONG = "freeze past the lease"
    """SIGSTOP until it counts as lost, and SIGCONT, should it still exist."""


_WEIGHT = {FaultKind.KILL: 4, FaultKind.RESTART: 2, FaultKind.FREEZE: 3, FaultKind.FREEZE_LONG: 2}


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` from the start this is done to that worker; a frozen one thaws after `frozen_s`."""

    at_s: float
    worker_id: str
    kind: FaultKind
    frozen_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.worker_id}" + (f" for {self.frozen_s:.1f} s" if self.frozen_s else "")


def schedule(workers: Sequence[str], mean_gap_s: float, lease_s: float, seed: int) -> Iterator[Fault]:
    """Faults at exponential gaps, rising in time. Worker and kind are drawn anew: a whole pool may be gone."""
    rng = random.Random(seed)
    ends: dict[str, deque[float]] = {worker: deque(maxlen=MOST_ENDS) for worker in sorted(workers)}
    at_s = 0.0
    while True:
        at_s += rng.expovariate(1 / mean_gap_s)
        worker = rng.choice(sorted(ends))
        (kind,) = rng.choices(list(_WEIGHT), list(_WEIGHT.values()))
        frozen_s = {FaultKind.FREEZE: rng.uniform(0.05, 0.7), FaultKind.FREEZE_LONG: rng.uniform(1.3, 2.0)}
        past = ends[worker]
        if kind is not FaultKind.FREEZE:
            if len(past) == MOST_ENDS and at_s - past[0] < ENDS_WINDOW_S:
                kind = FaultKind.FREEZE
            else:
                past.append(at_s)
        yield Fault(at_s, worker, kind, lease_s * frozen_s.get(kind, 0.0))
