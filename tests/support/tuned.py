"""The core of live tuning in a made world: traffic, pools that obey, and predictions whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.bench.serving.slo import Slo
from twinpool.planner.autotune.core import AutotuneCore
from twinpool.planner.autotune.settings import AutotuneSettings, Mode
from twinpool.planner.autotune.words import (
    Arrived,
    ChangePools,
    Command,
    Ended,
    Event,
    Figures,
    Forecast,
    Note,
    Pools,
    Predict,
    Predicted,
    Prediction,
    Split,
    Tick,
    Write,
)

SLO = Slo(ttft_s=1.0, itl_p99_s=0.05)
WINDOW_S = COOL_DOWN_S = 60.0
EVEN = Split(2, 2)

Capacities = Callable[[Split], float]
"""The capacity that a prediction says pools have."""


def settings(mode: Mode = Mode.ACT, hysteresis: float = 0.1) -> AutotuneSettings:
    return AutotuneSettings(mode, SLO, window_s=WINDOW_S, cool_down_s=COOL_DOWN_S, hysteresis=hysteresis)


def forecast(split: Split, capacity: float, reach: float = 0.01) -> Forecast:
    """With an interval of `reach` times the capacity on both sides."""
    return Forecast(
        prefill=split.prefill,
        decode=split.decode,
        capacity_per_s=capacity,
        low_per_s=capacity * (1 - reach),
        high_per_s=capacity * (1 + reach),
        figures=Figures(attainment=1.0, goodput_per_s=1.0, ttft_p50_s=0.2, ttft_p99_s=0.4, itl_p99_s=0.02),
    )


def prediction(present: Split, capacity_of: Capacities, reach: float = 0.01) -> Prediction:
    """What a perfect planner would say."""
    splits = [Split(prefill, sum(present) - prefill) for prefill in range(1, sum(present))]
    best = max(splits, key=lambda split: (capacity_of(split), split == present))
    change = None if best == present else forecast(best, capacity_of(best), reach)
    return Prediction(stay=forecast(present, capacity_of(present), reach), change=change, num_requests=0)


@dataclass
class World:
    """`advance` lets time pass: a request a second that is served at once, a tick a second, and predictions by
    `capacity_of` that come at once. Pools obey after `obeys_after_s`."""

    core: AutotuneCore
    capacity_of: Capacities
    present: Split = EVEN
    obeys_after_s: float = 2.0
    reach: float = 0.01
    now: float = 0.0
    unsettled: str = ""
    movable: Split | None = None
    served_ttft_s: float = 0.2
    is_answering: bool = True
    changes: list[tuple[float, Split]] = field(default_factory=list)
    lines: list[object] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: list[Predict] = field(default_factory=list)
    _wanted: Split | None = None
    _count: int = 0

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            if self._wanted is not None and self.now - self.changes[-1][0] >= self.obeys_after_s:
                self.present, self._wanted = self._wanted, None
            self._count += 1
            name = str(self._count)
            self.feed(Arrived(name, 300, ()))
            self.feed(
                Ended(name, 50, is_completed=True, ttft_s=self.served_ttft_s, tpot_s=0.01, itl_p99_s=0.02)
            )
            unsettled = self.unsettled or ("" if self._wanted is None else "a worker changes role")
            self.feed(Tick(Pools(self.present, self.movable or self.present, unsettled)))

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Predict():
                self.asked.append(command)
                if self.is_answering:
                    answer = prediction(command.present, self.capacity_of, self.reach)
                    self.feed(Predicted(command.ticket, answer))
            case ChangePools(wanted):
                assert min(wanted) >= 1, f"{wanted} leaves a pool empty"
                assert self._wanted is None, "a change is under way"
                assert not self.unsettled, "workers are missing"
                self.changes.append((self.now, wanted))
                self._wanted = wanted
            case Write(line):
                self.lines.append(line)
            case Note(text):
                self.notes.append(text)


def world(capacity_of: Capacities, mode: Mode = Mode.ACT, **fields: object) -> World:
    return World(AutotuneCore(settings(mode), 0.0), capacity_of, **fields)  # type: ignore[arg-type]
