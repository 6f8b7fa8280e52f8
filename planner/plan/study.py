"""The search itself: bounds say where it is worth while, rough simulations rank layouts, replications decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from twinpool.bench.reports.model import Interval
from twinpool.bench.serving.slo import Slo
from twinpool.config import require
from twinpool.planner.plan.bounds import Bound, bound, bounds
from twinpool.planner.plan.experiments import Laboratory, Setting, Simulate
from twinpool.planner.plan.feasible import Floors, floors_of, refuse_impossible
from twinpool.planner.plan.layouts import Fleet, Layout
from twinpool.planner.plan.rates import change_of, grid_rate, interval_of, nearest_place
from twinpool.planner.plan.traffic import Lengths, Traffic, lengths_of

ROUGH_WIDTH = 3
"""Grid places: about 9 %, between which the rate is interpolated."""
_MOST_TRIED = 8
"""Layouts of one kind and size, beside those that are climbed to."""
_MOST_SIZES = 6
_SIMULATIONS = 100
"""That a plan takes or so: the effort is shared out among them."""
_FEWEST_REQUESTS = 300
_ROUGH_SHARE = 0.5
"""Of a stretch, for a rough simulation."""
_RESIDENCES, _TTFTS = 3.0, 6.0
"""A stretch should last for so many times of a request's stay, and of the TTFT objective: batches must fill, and queues
that grow slowly must have the time to become too long. One too short makes rates too high, at most up to the bound."""
_NEARLY = 0.97
"""Of the best rate: who does not serve that by a short stretch is worse."""
_MOST_PROBED = 3
_CLOSE = 0.05
"""A runner-up within this is a finalist, too."""
_FIRST_RATIO = 0.8
"""What is simulated over what is bounded, before anything was simulated."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned: traffic and objectives that a share (`attainment`) of requests must meet, at most `budget`
    accelerators. `effort` is how many requests may be simulated, in `replications` where it counts."""

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


@dataclass(slots=True)
class Study:
    """What is known so far. `rough` are highest rates by one short stretch, coarsely; `below` those of which no more is
    known than that they serve less; `sure` are by each replication."""

    question: Question
    fleet: Fleet
    simulate: Simulate
    say: Callable[[str], None] = lambda _: None
    rough: dict[Layout, float] = field(default_factory=dict)
    below: dict[Layout, float] = field(default_factory=dict)
    sure: dict[Layout, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lengths: Lengths = field(init=False)
    floors: Floors = field(init=False)
    lab: Laboratory = field(init=False)
    _bounds: dict[Layout, Bound] = field(default_factory=dict, init=False)
    _layouts: dict[int, list[Layout]] = field(default_factory=dict, init=False)
    _wanted: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError if no layout can do it, whatever the rate."""
        question = self.question
        self.floors = floors_of(self.fleet, question.traffic.shapes)
        refuse_impossible(self.floors, question.slo, question.attainment, question.budget)
        self.lengths = lengths_of(question.traffic.shapes)
        self.lab = Laboratory(self.simulate, question.attainment, question.seed, question.effort, self.say)

    def bound(self, layout: Layout) -> Bound:
        """The least of the layout's bounds."""
        if layout not in self._bounds:
            self._bounds[layout] = bound(self.fleet, layout, self.lengths, self.question.slo)
        return self._bounds[layout]

    def layouts(self, size: int) -> list[Layout]:
        """All of so many accelerators that may meet the objectives."""
        if size not in self._layouts:
            question = self.question
            self._layouts[size] = [
                layout
                for layout in (*self.fleet.splits(size), *self.fleet.colocated(size))
                if self.floors.allows(
                    layout.prefill_tp if layout.is_split else layout.decode_tp,
                    question.slo,
                    question.attainment,
                )
                and self.bound(layout).rate_per_s > 0
            ]
        return self._layouts[size]

    def setting(self, layout: Layout, share: float = 1.0) -> Setting:
        """How it is simulated: with that share of a stretch."""
        count = max(_FEWEST_REQUESTS, round(share * self.num_requests(layout.num_accelerators)))
        return Setting(layout.name, self.fleet.deployment(layout), self.question.traffic, count)

    def num_requests(self, size: int) -> int:
        """Requests of one stretch for layouts of so many accelerators, the same for all of them."""
        most = self.question.effort // _SIMULATIONS
        return max(_FEWEST_REQUESTS, min(most, self.num_wanted(size)))

    def num_wanted(self, size: int) -> int:
        """Requests that a stretch needs to last long enough, whatever the effort."""
        if size not in self._wanted:
            best = max(self.layouts(size), key=lambda layout: self.bound(layout).rate_per_s, default=None)
            self._wanted[size] = _FEWEST_REQUESTS if best is None else self._requests_of(best)
        return self._wanted[size]

    def _requests_of(self, layout: Layout) -> int:
        step_s = max(each.step_s for each in self.all_bounds(layout) if each.num_sequences)
        lasts_s = max(_RESIDENCES * self.lengths.steps * step_s, _TTFTS * (self.question.slo.ttft_s or 0.0))
        return math.ceil(self.bound(layout).rate_per_s * lasts_s)

    def survey(self, size: int) -> None:
        """Roughly, the best split and the best colocated layout of so many accelerators."""
        found = self.layouts(size)
        for kind in (True, False):
            ranked = sorted(
                (layout for layout in found if layout.is_split is kind),
                key=lambda layout: (-self.bound(layout).rate_per_s, layout),
            )
            self._try_in_order(ranked)
            self._climb(ranked)

    def _try_in_order(self, ranked: Sequence[Layout]) -> None:
        """Until no other one's bound is above what was found."""
        for layout in ranked[:_MOST_TRIED]:
            best = self.best(ranked)
            if best is not None and self.bound(layout).rate_per_s <= self.rough[best]:
                return
            self._try(layout, best)

    def _climb(self, ranked: Sequence[Layout]) -> None:
        """From the best to its neighbours, until none of them is better."""
        while (best := self.best(ranked)) is not None:
            near = [
                layout for layout in ranked if _are_neighbours(layout, best) and not self._is_tried(layout)
            ]
            if not near:
                return
            for layout in near:
                self._try(layout, best)

    def _try(self, layout: Layout, best: Layout | None) -> None:
        """Searches for its rate only if it serves nearly what the best does."""
        if self._is_tried(layout):
            return
        if best is not None:
            hurdle = _NEARLY * self.rough[best]
            if self.bound(layout).rate_per_s < hurdle or not self.holds(layout, hurdle):
                self.below[layout] = hurdle
                return
        self.rough_rate(layout)

    def _is_tried(self, layout: Layout) -> bool:
        return layout in self.rough or layout in self.below

    def holds(self, layout: Layout, rate: float) -> bool:
        """Whether enough requests of one short stretch meet the objectives at about that rate."""
        seen = self.lab.seen(self.setting(layout, _ROUGH_SHARE), grid_rate(nearest_place(rate)), 0)
        share = seen.share_good(self.question.slo)
        self.say(f"{layout.name} at {rate:.3g} requests/s: {share:.0%} within the objectives")
        return share >= self.question.attainment

    def rough_rate(self, layout: Layout) -> float:
        """By one short stretch, coarsely."""
        if layout not in self.rough:
            most = self.bound(layout).rate_per_s
            start = most * self._ratio(layout.is_split)
            setting = self.setting(layout, _ROUGH_SHARE)
            self.rough[layout] = self.lab.capacity(
                setting, self.question.slo, 0, start, most, ROUGH_WIDTH
            ).rate
            self.below.pop(layout, None)
        return self.rough[layout]

    def _ratio(self, is_split: bool) -> float:
        """What was simulated over what was bounded, so far."""
        known = [
            rate / self.bound(layout).rate_per_s
            for layout, rate in self.rough.items()
            if layout.is_split is is_split and rate > 0
        ]
        return min(1.0, known[-1]) if known else _FIRST_RATIO

    def rate(self, layout: Layout) -> float | None:
        """As well as it is known."""
        if layout in self.sure:
            return fmean(self.sure[layout])
        return self.rough.get(layout)

    def best(self, layouts: Iterable[Layout]) -> Layout | None:
        """The one that serves most, of those that were simulated; the first of equal ones."""
        known = [(rate, layout) for layout in layouts if (rate := self.rate(layout)) is not None]
        return max(known, key=lambda each: each[0])[1] if known else None

    def fewest(self) -> int:
        """The smallest size that serves the traffic's rate, by rough rates; the budget if nobody said a rate or none
        does."""
        wanted, size = self.question.traffic.rate_per_s, self.question.budget
        best = self.best(self.rough)
        if wanted is None or best is None or not self.serves(best, wanted):
            return size
        per_accelerator = (self.rate(best) or 0.0) / best.num_accelerators
        guess = max(1, min(size, math.ceil(wanted / per_accelerator)))
        tried = {size: True}
        while len(tried) < _MOST_SIZES and guess >= 1 and guess not in tried:
            tried[guess] = self._some_serves(guess, wanted)
            guess += -1 if tried[guess] else 1
        found = min(each for each, serves in tried.items() if serves)
        if found < size:
            self.survey(found)
        return found

    def _some_serves(self, size: int, wanted: float) -> bool:
        """Whether one of the layouts with the highest bounds does, split or colocated."""
        for kind in (True, False):
            able = [each for each in self.layouts(size) if each.is_split is kind]
            able = [each for each in able if self.bound(each).rate_per_s >= wanted]
            able.sort(key=lambda layout: (-self.bound(layout).rate_per_s, layout))
            if any(self.holds(layout, wanted) for layout in able[:_MOST_PROBED]):
                return True
        return False

    def serves(self, layout: Layout, wanted: float) -> bool:
        """Whether it is known to serve that rate."""
        return (self.rate(layout) or 0.0) >= wanted

    def finalists(self, size: int) -> list[Layout]:
        """The best split, the runner-up if it is close, and the best colocated layout, of so many accelerators."""
        of_size = [
            layout for layout in self.rough if layout.num_accelerators == size and self.rough[layout] > 0
        ]
        ranked = sorted(of_size, key=lambda layout: (-self.rough[layout], layout))
        splits = [layout for layout in ranked if layout.is_split]
        close = [
            layout for layout in splits[1:2] if self.rough[layout] >= (1 - _CLOSE) * self.rough[splits[0]]
        ]
        return splits[:1] + close + [layout for layout in ranked if not layout.is_split][:1]

    def confirm(self, layouts: Sequence[Layout]) -> None:
        """Each by all replications, whose first parts are there for all if it is interrupted."""
        for replication in range(self.question.replications):
            for layout in layouts:
                most = self.bound(layout).rate_per_s
                start = self.rate(layout) or most
                found = self.lab.capacity(self.setting(layout), self.question.slo, replication, start, most)
                self.sure.setdefault(layout, []).append(found.rate)

    def interval(self, layout: Layout) -> Interval | None:
        """The highest rate with its interval, if replications say it."""
        rates = self.sure.get(layout, [])
        return interval_of(rates, self.question.confidence) if rates else None

    def difference(self, before: Layout, after: Layout) -> Interval | None:
        """How much more the one serves than the other, by the same replications."""
        pairs = zip(self.sure.get(before, []), self.sure.get(after, []), strict=False)
        found = list(pairs)
        return change_of([a for a, _ in found], [b for _, b in found], self.question.confidence)

    def all_bounds(self, layout: Layout) -> tuple[Bound, ...]:
        """Of each of its pools."""
        return bounds(self.fleet, layout, self.lengths, self.question.slo)


def _are_neighbours(layout: Layout, other: Layout) -> bool:
    """Whether one worker changes its role between them, where all have the same degrees."""
    degrees = (layout.prefill_tp, layout.decode_tp) == (other.prefill_tp, other.decode_tp)
    return layout.is_split and other.is_split and degrees and abs(layout.prefill - other.prefill) == 1
