"""Predictions for live tuning: what the present pools, and the best of as many workers, serve of some traffic.

It is a small plan, by the planner's own means: closed forms say which pools are worth a simulation, a short stretch of
the traffic ranks them, and further stretches of the two that count say how sure that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from twinpool.bench.serving.datasets.shapes import Shape, own, shared_prefix
from twinpool.bench.serving.slo import Slo
from twinpool.planner.autotune.window import PREFIX_CHUNK
from twinpool.planner.autotune.words import Figures, Forecast, PastTraffic, Prediction, Split
from twinpool.planner.plan.bounds import bound
from twinpool.planner.plan.experiments import Laboratory, Point, Setting, Simulate
from twinpool.planner.plan.layouts import Fleet, Layout
from twinpool.planner.plan.rates import grid_rate, interval_of, nearest_place
from twinpool.planner.plan.traffic import Traffic, lengths_of, traffic_of

REPLICATIONS = 3
CONFIDENCE = 0.9
LEAST_STRETCH, MOST_STRETCH = 60, 160
"""Requests of a stretch."""
ROUGH_WIDTH = 3
"""Grid places: about 9 %, between which a rate is interpolated."""
_FIRST_RATIO = 0.8
"""Of the bound: where the first search begins."""
_NEARLY = 0.97
"""Of the best rate: who does not serve that is worse."""
_MOST_TRIED = 8


@dataclass(frozen=True, slots=True)
class Aim:
    """What a share `attainment` of requests is to meet."""

    slo: Slo
    attainment: float


def shapes_of(traffic: PastTraffic, max_model_len: int) -> list[Shape]:
    """The requests for the simulator. What is longer than the context, an answer whose length was guessed, is cut."""
    shapes = []
    for number, each in enumerate(traffic.requests):
        pieces = (
            *(shared_prefix(chunk, PREFIX_CHUNK) for chunk in each.prefix),
            own(number, each.own_tokens),
        )
        room = max_model_len - PREFIX_CHUNK * len(each.prefix) - each.own_tokens
        shapes.append(Shape(pieces, max(1, min(each.output_tokens, room)), each.at_s))
    return shapes


def predict(
    past: PastTraffic,
    present: Split,
    fleet: Fleet,
    aim: Aim,
    simulate: Simulate,
    *,
    replications: int = REPLICATIONS,
    most_requests: int = MOST_STRETCH,
    seed: int = 0,
) -> Prediction:
    """Of the pools as they are, and of the best ones of as many workers. Same arguments, same result.

    Stretches have `most_requests` at most. Where the present pools are the best, one of them does.

    Raises:
        ConfigError: nothing can be said of such traffic; the message says why.
    """
    traffic = traffic_of(shapes_of(past, fleet.max_model_len), past.rate_per_s, "the last minutes")
    return _Search(traffic, present, fleet, aim, simulate, replications, most_requests, seed).run()


@dataclass(slots=True)
class _Search:
    """One prediction in the making. `rough` are highest rates by one stretch."""

    traffic: Traffic
    present: Split
    fleet: Fleet
    aim: Aim
    simulate: Simulate
    replications: int
    most_requests: int
    seed: int
    rough: dict[Layout, float] = field(default_factory=dict)
    bounds: dict[Layout, float] = field(default_factory=dict)
    lab: Laboratory = field(init=False)
    num_requests: int = field(init=False)

    def __post_init__(self) -> None:
        self.lab = Laboratory(self.simulate, self.aim.attainment, self.seed, 0)
        self.num_requests = max(LEAST_STRETCH, min(self.most_requests, len(self.traffic.shapes)))
        lengths = lengths_of(self.traffic.shapes)
        for layout in self.fleet.splits(sum(self.present)):
            self.bounds[layout] = bound(self.fleet, layout, lengths, self.aim.slo).rate_per_s

    def run(self) -> Prediction:
        """Ranks, then makes sure."""
        present = Layout(*self.present)
        self._search(present)
        for layout in sorted(self.bounds, key=lambda each: (-self.bounds[each], each))[:_MOST_TRIED]:
            self._try(layout)
        best = max(self.rough, key=lambda each: (self.rough[each], each == present))
        if best == present:
            stay, change = self._forecast(present, 1), None
        else:
            stay, change = (self._forecast(layout, self.replications) for layout in (present, best))
        return Prediction(stay=stay, change=change, num_requests=self.lab.num_requests)

    def _try(self, layout: Layout) -> None:
        """Searches for its rate only if it may serve nearly what the best does."""
        hurdle = _NEARLY * max(self.rough.values())
        if layout in self.rough or self.bounds[layout] <= hurdle:
            return
        if hurdle and not self._holds(layout, hurdle):
            return
        self._search(layout)

    def _holds(self, layout: Layout, rate: float) -> bool:
        seen = self.lab.seen(self._setting(layout), grid_rate(nearest_place(rate)), 0)
        return seen.share_good(self.aim.slo) >= self.aim.attainment

    def _search(self, layout: Layout) -> None:
        most = self.bounds[layout]
        known = [rate / self.bounds[each] for each, rate in self.rough.items() if rate > 0]
        ratio = min(1.0, known[-1]) if known else _FIRST_RATIO
        self.rough[layout] = self._rate(layout, 0, most * ratio)

    def _rate(self, layout: Layout, replication: int, start: float) -> float:
        most = self.bounds[layout]
        if most <= 0 or not math.isfinite(most):
            return 0.0
        setting = self._setting(layout)
        return self.lab.capacity(setting, self.aim.slo, replication, start or most, most, ROUGH_WIDTH).rate

    def _forecast(self, layout: Layout, replications: int) -> Forecast:
        start = self.rough[layout]
        rates = [start, *(self._rate(layout, number, start) for number in range(1, replications))]
        found = interval_of(rates, CONFIDENCE)
        rate = self.traffic.rate_per_s or 0.0
        point = self.lab.point(self._setting(layout), self.aim.slo, rate, range(min(2, self.replications)))
        return Forecast(
            prefill=layout.prefill,
            decode=layout.decode,
            capacity_per_s=found.estimate,
            low_per_s=found.low,
            high_per_s=found.high,
            figures=_figures(point),
        )

    def _setting(self, layout: Layout) -> Setting:
        return Setting(layout.name, self.fleet.deployment(layout), self.traffic, self.num_requests)


def _figures(point: Point) -> Figures:
    times = (point.ttft_p50_s, point.ttft_p99_s, point.itl_p99_s)
    ttft_p50_s, ttft_p99_s, itl_p99_s = (value if math.isfinite(value) else None for value in times)
    return Figures(
        attainment=point.attainment,
        goodput_per_s=point.attainment * point.rate,
        ttft_p50_s=ttft_p50_s,
        ttft_p99_s=ttft_p99_s,
        itl_p99_s=itl_p99_s,
    )
