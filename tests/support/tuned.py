"""The core of live tuning in a made world: traffic, pools that obey, and predictions whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.bench.serving.slo import Slo
from twinpool.planner.autotune.core import AutotuneCore
from twinpool.planner.autotune.predicting import other_size
from twinpool.planner.autotune.settings import AutotuneSettings, Mode, WorkerBounds
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
    Recommendation,
    Sizes,
    Split,
    Tick,
    Write,
)

SLO = Slo(ttft_s=1.0, itl_p99_s=0.05)
WINDOW_S = COOL_DOWN_S = 60.0
EVEN = Split(2, 2)

Capacities = Callable[[Split], float]
"""The capacity that a prediction says pools have."""


def settings(
    mode: Mode = Mode.ACT, hysteresis: float = 0.1, workers: WorkerBounds | None = None
) -> AutotuneSettings:
    return AutotuneSettings(
        mode, SLO, window_s=WINDOW_S, cool_down_s=COOL_DOWN_S, hysteresis=hysteresis, workers=workers
    )


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


def prediction(
    present: Split,
    capacity_of: Capacities,
    reach: float = 0.01,
    rate_per_s: float = 1.0,
    sizes: Sizes | None = None,
) -> Prediction:
    """What a perfect planner would say."""

    def best_of(size: int) -> Split:
        splits = [Split(prefill, size - prefill) for prefill in range(1, size)]
        return max(splits, key=lambda split: (capacity_of(split), split == present))

    best = best_of(present.size)
    change = None if best == present else forecast(best, capacity_of(best), reach)
    size = other_size(present.size, capacity_of(best), rate_per_s, sizes)
    resize = None if size is None else forecast(best_of(size), capacity_of(best_of(size)), reach)
    stay = forecast(present, capacity_of(present), reach)
    return Prediction(stay=stay, change=change, resize=resize)


@dataclass
class World:
    """`advance` lets time pass: a request of `prompt_tokens` every `period_s` seconds that is served at once, a tick a
    second, and predictions by `capacity_of` that come at once. Pools obey after `obeys_after_s`, and have as many
    workers as `sizes` allows (None: as at first)."""

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
    prompt_tokens: int = 300
    period_s: int = 1
    sizes: Sizes | None = None
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
            if self._count % self.period_s == 0:
                self._serve(str(self._count))
            unsettled = self.unsettled or ("" if self._wanted is None else "a worker changes role")
            self.feed(Tick(Pools(self.present, self.movable or self.present, unsettled)))

    def _serve(self, name: str) -> None:
        self.feed(Arrived(name, self.prompt_tokens, ()))
        self.feed(Ended(name, 50, is_completed=True, ttft_s=self.served_ttft_s, tpot_s=0.01, itl_p99_s=0.02))

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Predict():
                self.asked.append(command)
                if self.is_answering:
                    rate = command.traffic.rate_per_s
                    answer = prediction(command.present, self.capacity_of, self.reach, rate, self.sizes)
                    self.feed(Predicted(command.ticket, answer))
            case ChangePools(wanted):
                assert min(wanted) >= 1, f"{wanted} leaves a pool empty"
                assert self._wanted is None, "a change is under way"
                assert not self.unsettled, "workers are missing"
                fewest, most = (
                    (self.sizes.fewest, self.sizes.most) if self.sizes else (sum(self.present),) * 2
                )
                assert fewest <= sum(wanted) <= most, f"{wanted} are too few or too many"
                self.changes.append((self.now, wanted))
                self._wanted = wanted
            case Write(line):
                self.lines.append(line)
            case Note(text):
                self.notes.append(text)


def world(
    capacity_of: Capacities, mode: Mode = Mode.ACT, workers: WorkerBounds | None = None, **fields: object
) -> World:
    made = settings(mode, workers=workers)
    sizes = None if workers is None else Sizes(*workers, room=made.hysteresis)
    return World(AutotuneCore(made, 0.0), capacity_of, sizes=sizes, **fields)  # type: ignore[arg-type]


def recommendations(of: World) -> list[Recommendation]:
    """What it has recommended so far."""
    return [line for line in of.lines if isinstance(line, Recommendation)]
