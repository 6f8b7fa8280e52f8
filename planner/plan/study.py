"""What is known of layouts so far: bounds in closed form, highest rates of one short stretch and of replications."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from twinpool.bench.reports.model import Interval
from twinpool.bench.serving.slo import Slo
from twinpool.config import require
from twinpool.planner.plan.bounds import Bound, bound, bounds
from twinpool.planner.plan.experiments import Laboratory, Setting, Simulate
from twinpool.planner.plan.feasible import Floors, floors_of, refuse_impossible
from twinpool.planner.plan.layouts import Layout, LayoutSpace
from twinpool.planner.plan.rates import change_of, grid_rate, nearest_place, rate_interval
from twinpool.planner.plan.traffic import Lengths, Traffic, lengths_of

ROUGH_WIDTH = 3
"""Grid places: about 9 %, between which the rate is interpolated."""
_SIMULATIONS = 50
"""That a plan takes or so, half of them of short stretches: the effort is shared out among them."""
_FEWEST_REQUESTS = 300
_ROUGH_SHARE = 0.5
"""Of a stretch, for a rough simulation."""
_RESIDENCES, _TTFTS = 3.0, 6.0
"""A stretch should last for so many times of a request's stay, and of the TTFT objective: batches must fill, and queues
that grow slowly must have the time to become too long. One too short makes rates too high, at most up to the bound."""
FIRST_RATIO = 0.8
"""What is simulated over what is bounded, before anything was simulated."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned: traffic and objectives that a share (`attainment`) of requests must meet, at most `budget`
    accelerators. `effort` is about how many requests are simulated (stretches are as long as that allows), in
    `replications` where it counts."""

    traffic: Traffic
    slo: Slo
    attainment: float = 0.9
    budget: int = 8
    confidence: float = 0.9
    replications: int = 4
    effort: int = 60_000
    seed: int = 0

    def __post_init__(self) -> None:
        require("--attainment", self.attainment, 0 < self.attainment < 1, "between 0 and 1")
        require("--budget", self.budget, self.budget >= 1, "1 or more accelerators")
        require("--confidence", self.confidence, 0 < self.confidence < 1, "between 0 and 1")
        require("--replications", self.replications, self.replications >= 2, "2 or more")
        require("--effort", self.effort, self.effort >= 10_000, "10000 simulated requests or more")
        rate = self.traffic.rate_per_s
        require("--rate", rate, rate is None or 0 < rate < math.inf, "above 0 requests per second")


class Why(StrEnum):
    """Why a layout's highest rate was not searched for."""

    BOUND = "its bound is below what another one serves"
    STRETCH = "one short stretch showed that it serves less than another one"
    LEFT_OUT = "others of its size have higher bounds, and enough of them were tried"
    SIZE = "so many accelerators were not searched"


class Pruned(NamedTuple):
    """All that is known of a layout: it serves less than `below_per_s`."""

    below_per_s: float
    why: Why


@dataclass(slots=True)
class Study:
    """What is known so far. `rough` are highest rates by one short stretch, coarsely; `sure` are by each replication;
    the rate of those that are `pruned` was not searched for."""

    question: Question
    space: LayoutSpace
    simulate: Simulate
    say: Callable[[str], None] = lambda _: None
    rough: dict[Layout, float] = field(default_factory=dict)
    sure: dict[Layout, list[float]] = field(default_factory=dict)
    pruned: dict[Layout, Pruned] = field(default_factory=dict)
    lengths: Lengths = field(init=False)
    floors: Floors = field(init=False)
    lab: Laboratory = field(init=False)
    _bounds: dict[Layout, Bound] = field(default_factory=dict, init=False)
    _layouts: dict[int, list[Layout]] = field(default_factory=dict, init=False)
    _wanted: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError if no layout can do it, whatever the rate."""
        question = self.question
        self.floors = floors_of(self.space, question.traffic.shapes)
        refuse_impossible(self.floors, question.slo, question.attainment, question.budget)
        self.lengths = lengths_of(question.traffic.shapes)
        self.lab = Laboratory(self.simulate, question.attainment, question.seed, self.say)

    # ── layouts and their bounds ────────────────────────────────────────────────────────────────────────────

    def bound(self, layout: Layout) -> Bound:
        """The least of the layout's bounds."""
        if layout not in self._bounds:
            self._bounds[layout] = bound(self.space, layout, self.lengths, self.question.slo)
        return self._bounds[layout]

    def all_bounds(self, layout: Layout) -> tuple[Bound, ...]:
        """Of each of its pools."""
        return bounds(self.space, layout, self.lengths, self.question.slo)

    def layouts(self, size: int) -> list[Layout]:
        """All of so many accelerators that may meet the objectives, the highest bound first."""
        if size not in self._layouts:
            question = self.question
            found = [
                layout
                for layout in (*self.space.splits(size), *self.space.colocated(size))
                if self.floors.allows(
                    layout.prefill_tp if layout.is_split else layout.decode_tp,
                    question.slo,
                    question.attainment,
                )
                and self.bound(layout).rate_per_s > 0
            ]
            found.sort(key=lambda layout: (-self.bound(layout).rate_per_s, layout))
            self._layouts[size] = found
        return self._layouts[size]

    # ── simulations ─────────────────────────────────────────────────────────────────────────────────────────

    def setting(self, layout: Layout, share: float = 1.0) -> Setting:
        """How it is simulated: with that share of a stretch."""
        count = max(_FEWEST_REQUESTS, round(share * self.num_requests(layout.num_accelerators)))
        return Setting(layout.name, self.space.deployment(layout), self.question.traffic, count)

    def short_setting(self, layout: Layout) -> Setting:
        """How it is simulated at first."""
        return self.setting(layout, _ROUGH_SHARE)

    def num_requests(self, size: int) -> int:
        """Requests of one stretch for layouts of so many accelerators, the same for all of them."""
        most = self.question.effort // _SIMULATIONS
        return max(_FEWEST_REQUESTS, min(most, self.num_wanted(size)))

    def num_wanted(self, size: int) -> int:
        """Requests that a stretch needs to last long enough, whatever the effort."""
        if size not in self._wanted:
            found = self.layouts(size)
            self._wanted[size] = self._requests_of(found[0]) if found else _FEWEST_REQUESTS
        return self._wanted[size]

    def _requests_of(self, layout: Layout) -> int:
        step_s = max((each.step_s for each in self.all_bounds(layout) if each.num_sequences), default=0.0)
        lasts_s = max(_RESIDENCES * self.lengths.steps * step_s, _TTFTS * (self.question.slo.ttft_s or 0.0))
        return math.ceil(self.bound(layout).rate_per_s * lasts_s)

    def short_share(self, layout: Layout, rate: float) -> float:
        """Of the requests of one short stretch that meet the objectives at about that rate."""
        seen = self.lab.seen(self.short_setting(layout), grid_rate(nearest_place(rate)), 0)
        share = seen.share_good(self.question.slo)
        self.say(f"{layout.name} at {rate:.3g} requests/s: {share:.0%} within the objectives")
        return share

    def holds(self, layout: Layout, rate: float) -> bool:
        """Whether enough requests of one short stretch meet the objectives at about that rate."""
        return self.short_share(layout, rate) >= self.question.attainment

    def rough_rate(self, layout: Layout) -> float:
        """By one short stretch, coarsely."""
        if layout not in self.rough:
            most = self.bound(layout).rate_per_s
            found = self.lab.capacity(
                self.short_setting(layout),
                self.question.slo,
                0,
                self.first_rate(layout),
                most,
                ROUGH_WIDTH,
            )
            self.rough[layout] = found.rate
            self.pruned.pop(layout, None)
        return self.rough[layout]

    def first_rate(self, layout: Layout) -> float:
        """Where a search of its highest rate begins: at its bound, times what was simulated over what was bounded of
        the layout of its kind whose bound is nearest."""
        own = self.bound(layout)
        known = {
            other: rate
            for other, rate in self.rough.items()
            if other.is_split is layout.is_split and rate > 0 and self.bound(other).limit is own.limit
        }
        if not known:
            return FIRST_RATIO * own.rate_per_s
        nearest = min(known, key=lambda other: (abs(self.bound(other).rate_per_s - own.rate_per_s), other))
        return own.rate_per_s * min(1.0, known[nearest] / self.bound(nearest).rate_per_s)

    # ── what they come to ───────────────────────────────────────────────────────────────────────────────────

    def rate(self, layout: Layout) -> float | None:
        """As well as it is known."""
        if layout in self.sure:
            return fmean(self.sure[layout])
        return self.rough.get(layout)

    def best(self, layouts: Iterable[Layout]) -> Layout | None:
        """The one that serves most, of those that serve anything; the first of equal ones."""
        known = [(rate, layout) for layout in layouts if (rate := self.rate(layout))]
        return max(known, key=lambda each: each[0])[1] if known else None

    def serves(self, layout: Layout | None, wanted: float) -> bool:
        """Whether it is known to serve that rate."""
        return layout is not None and (self.rate(layout) or 0.0) >= wanted

    def interval(self, layout: Layout) -> Interval | None:
        """The highest rate with its interval, if replications say it."""
        rates = self.sure.get(layout, [])
        return rate_interval(rates, self.question.confidence) if rates else None

    def is_at_bound(self, layout: Layout) -> bool:
        """Whether its objectives held up to its bound in each replication: nothing showed where it ends."""
        return layout in self.sure and min(self.sure[layout]) >= self.bound(layout).rate_per_s

    def difference(self, before: Layout, after: Layout, confidence: float | None = None) -> Interval | None:
        """How much more `after` serves than `before`, as a share, by the replications that both had."""
        pairs = list(zip(self.sure.get(before, []), self.sure.get(after, []), strict=False))
        return change_of([a for a, _ in pairs], [b for _, b in pairs], confidence or self.question.confidence)
