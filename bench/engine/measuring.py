"""How an operation is measured: in rounds, each of which measures the limits first and then the operation.

So a machine that gets slower or faster meanwhile changes both, and the ratio not; and the caches hold nothing of the
operation's data when it starts, as in a real step, which reads more weights than any cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from twinpool.bench.engine.ceilings import Limits
from twinpool.bench.engine.floors import Ceilings, Work
from twinpool.bench.engine.report import Measurement
from twinpool.bench.engine.timing import Run, Timer

LEAST_ROUNDS = 3
"""Also of an operation so slow that it uses up its time."""


@dataclass(slots=True)
class Bench:
    """Measures on one device and keeps what it found. `publish` is called with each result at once.

    After a run that does not count, an operation is measured `rounds` times, or for `most_s` seconds if that is less.
    """

    timer: Timer
    limits: Limits
    rounds: int
    most_s: float
    publish: Callable[[Measurement], None] = lambda _: None
    measurements: list[Measurement] = field(default_factory=list)
    ceilings: list[Ceilings] = field(default_factory=list)

    def operation(
        self, group: str, name: str, run: Run, work: Work, amount: float = 0.0, unit: str = ""
    ) -> None:
        """Measures `run`, which does `work`, beside the floor that the limits of the same round give."""
        seconds, floors = [], []
        bound_by_memory = False
        for _ in self._rounds(run):
            ceilings = self.measure_limits()
            seconds.append(self.timer.seconds(run))
            floors.append(ceilings.floor_s(work))
            bound_by_memory = ceilings.is_bound_by_memory(work)
        floor = "memory" if bound_by_memory else "arithmetic"
        self._keep(Measurement(group, name, tuple(seconds), tuple(floors), floor, work, amount, unit))

    def against(
        self,
        group: str,
        name: str,
        run_s: Callable[[], float],
        floor: str,
        floor_s: Callable[[], float],
        amount: float,
        unit: str,
    ) -> None:
        """Measures what reports its own seconds beside what does the same in the simplest way that there is."""
        floor_s()
        seconds, floors = [], []
        for _ in self._rounds(run_s):
            self.measure_limits()
            floors.append(floor_s())
            self.measure_limits()
            seconds.append(run_s())
        self._keep(Measurement(group, name, tuple(seconds), tuple(floors), floor, None, amount, unit))

    def alone(self, group: str, name: str, run: Run, amount: float = 0.0, unit: str = "") -> None:
        """Measures `run`, which nothing bounds."""
        seconds = [self.timer.seconds(run) for _ in self._rounds(run)]
        self._keep(Measurement(group, name, tuple(seconds), amount=amount, unit=unit))

    def found(self, measurement: Measurement) -> None:
        """Keeps what was measured elsewhere."""
        self._keep(measurement)

    def measure_limits(self) -> Ceilings:
        """One round of the limits, kept for their medians."""
        self.ceilings.append(self.limits.measure())
        return self.ceilings[-1]

    def _rounds(self, run: Run) -> Iterator[int]:
        run()
        started = time.perf_counter()
        for number in range(self.rounds):
            if number >= LEAST_ROUNDS and time.perf_counter() - started > self.most_s:
                return
            yield number

    def _keep(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self.publish(measurement)
