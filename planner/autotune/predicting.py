"""Predictions for live tuning: what the present pools, and the best of as many workers, serve of some traffic.

It is a small plan, by the planner's own means: closed forms say which pools are worth a simulation, a short stretch of
the traffic ranks them, and further stretches of the two that count say how sure that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from twinpool.bench.serving.datasets.shapes import Shape, own, shared_prefix
from twinpool.bench.serving.slo import Slo
from twinpool.coordinator.routing import CHUNK_TOKENS
from twinpool.planner.autotune.words import Figures, Forecast, PastTraffic, Prediction, Sizes, Split
from twinpool.planner.plan.bounds import bound
from twinpool.planner.plan.experiments import Laboratory, Point, Setting, Simulate
from twinpool.planner.plan.layouts import Layout, LayoutSpace
from twinpool.planner.plan.rates import grid_rate, nearest_place, rate_interval
from twinpool.planner.plan.search import MOST_TRIED, NEARLY
from twinpool.planner.plan.study import FIRST_RATIO, ROUGH_WIDTH
from twinpool.planner.plan.traffic import Lengths, Traffic, lengths_of, traffic_of

REPLICATIONS = 3
CONFIDENCE = 0.9
LEAST_STRETCH, MOST_STRETCH = 60, 160
"""Requests of a stretch."""
FIGURE_STRETCHES = 2
"""Of which the figures at the traffic's own rate are, which errors are counted of: p99 of one stretch is chance."""


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
            *(shared_prefix(chunk, CHUNK_TOKENS) for chunk in each.prefix),
            own(number, each.own_tokens),
        )
        room = max_model_len - CHUNK_TOKENS * len(each.prefix) - each.own_tokens
        shapes.append(Shape(pieces, max(1, min(each.output_tokens, room)), each.at_s))
    return shapes


def predict(
    past: PastTraffic,
    present: Split,
    space: LayoutSpace,
    aim: Aim,
    simulate: Simulate,
    *,
    sizes: Sizes | None = None,
    replications: int = REPLICATIONS,
    most_requests: int = MOST_STRETCH,
    seed: int = 0,
) -> Prediction:
    """Of the pools as they are, of the best ones of as many workers, and of others if `sizes` allows that. Same
    arguments, same result.

    Stretches have `most_requests` at most. Where the present pools are the best, their capacity is of one.

    Raises:
        ConfigError: nothing can be said of such traffic; the message says why.
    """
    traffic = traffic_of(shapes_of(past, space.max_model_len), past.rate_per_s, "the last minutes")
    return _Search(traffic, present, space, aim, simulate, sizes, replications, most_requests, seed).run()


def other_size(size: int, capacity_per_s: float, rate_per_s: float, sizes: Sizes | None) -> int | None:
    """How many workers are worth a look where `size` serve up to `capacity_per_s`: as many as would serve the traffic
    with room if each did as much, twice as many at most; or one fewer if the rest would. None: no others may be."""
    if sizes is None:
        return None
    wanted_per_s = rate_per_s * (1 + sizes.room)
    if capacity_per_s >= wanted_per_s:
        return (
            size - 1 if size > sizes.fewest and capacity_per_s * (size - 1) / size >= wanted_per_s else None
        )
    enough = math.ceil(size * wanted_per_s / capacity_per_s) if capacity_per_s > 0 else size + 1
    grown = min(max(enough, size + 1), 2 * size, sizes.most)
    return grown if grown > size else None


@dataclass(slots=True)
class _Search:
    """One prediction in the making. `rough` are highest rates by one stretch, `bounds` such as nothing can serve."""

    traffic: Traffic
    present: Split
    space: LayoutSpace
    aim: Aim
    simulate: Simulate
    sizes: Sizes | None
    replications: int
    most_requests: int
    seed: int
    rough: dict[Layout, float] = field(default_factory=dict)
    bounds: dict[Layout, float] = field(default_factory=dict)
    lab: Laboratory = field(init=False)
    num_requests: int = field(init=False)
    lengths: Lengths = field(init=False)

    def __post_init__(self) -> None:
        self.lab = Laboratory(self.simulate, self.aim.attainment, self.seed)
        self.num_requests = max(LEAST_STRETCH, min(self.most_requests, len(self.traffic.shapes)))
        self.lengths = lengths_of(self.traffic.shapes)

    def run(self) -> Prediction:
        """Ranks, then makes sure."""
        present = Layout(*self.present)
        best = self._best(self.present.size, present)
        size = other_size(self.present.size, self.rough[best], self.traffic.rate_per_s or 0.0, self.sizes)
        resized = None if size is None else self._best(size)
        replications = 1 if best == present and resized is None else self.replications
        stay = self._forecast(present, replications)
        change = None if best == present else self._forecast(best, replications)
        resize = None if resized is None else self._forecast(resized, replications)
        return Prediction(stay=stay, change=change, resize=resize)

    def _best(self, size: int, present: Layout | None = None) -> Layout:
        """Of so many workers; `present` where another one is not better."""
        layouts = list(self.space.splits(size))
        for layout in layouts:
            self.bounds[layout] = bound(self.space, layout, self.lengths, self.aim.slo).rate_per_s
        tried = sorted(layouts, key=lambda each: (-self.bounds[each], each))[:MOST_TRIED]
        best = present or tried[0]
        self._search(best)
        for layout in tried:
            if self._may_be_better(layout, best):
                self._search(layout)
                best = max(best, layout, key=lambda each: self.rough[each])
        return best

    def _may_be_better(self, layout: Layout, best: Layout) -> bool:
        """Whether it serves nearly what the best one does: then its rate is worth a search."""
        hurdle = NEARLY * self.rough[best]
        if layout in self.rough or self.bounds[layout] <= hurdle:
            return False
        return not hurdle or self._holds(layout, hurdle)

    def _holds(self, layout: Layout, rate: float) -> bool:
        seen = self.lab.seen(self._setting(layout), grid_rate(nearest_place(rate)), 0)
        return seen.share_good(self.aim.slo) >= self.aim.attainment

    def _search(self, layout: Layout) -> None:
        most = self.bounds[layout]
        known = [rate / self.bounds[each] for each, rate in self.rough.items() if rate > 0]
        ratio = min(1.0, known[-1]) if known else FIRST_RATIO
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
        found = rate_interval(rates, CONFIDENCE)
        rate = self.traffic.rate_per_s or 0.0
        stretches = range(min(FIGURE_STRETCHES, self.replications))
        point = self.lab.point(self._setting(layout), self.aim.slo, rate, stretches)
        return Forecast(
            prefill=layout.prefill,
            decode=layout.decode,
            capacity_per_s=found.estimate,
            low_per_s=found.low,
            high_per_s=found.high,
            figures=_figures(point),
        )

    def _setting(self, layout: Layout) -> Setting:
        return Setting(layout.name, self.space.deployment(layout), self.traffic, self.num_requests)


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
