"""Where is the highest rate at which objectives hold? Chooses the next rate to try from those tried so far; pure.

An objective holds at a rate if at least a *target* share of the requests meet it, of which one is sure only to a point:
Wilson's interval of the share decides (E. B. Wilson, Journal of the American Statistical Association 22, 1927). Where
it holds both answers possible, the rate is tried again, a few times. One run of a rate says something of every
objective, so several are searched for together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Probe:
    """A run at a rate: how many of its requests met each objective, by the objective's name."""

    rate: float
    num_requests: int
    num_good: Mapping[str, int]


class Holds(Enum):
    """What the runs at one rate say."""

    YES = "yes"
    NO = "no"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Bracket:
    """It holds at `low` (0: at no rate that was tried) and not at `high` (infinite: that was not found)."""

    low: float
    high: float

    @property
    def width(self) -> float:
        """high / low."""
        return self.high / self.low if self.low > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Search:
    """How to search: from `start`, by factors of `growth` while one side is open, until high / low ≤ `resolution`.

    `target` is the share that must meet the objective, `confidence` how sure both answers must be. An unsure rate is
    tried `tries` times. Below start / `span` and above start · `span` nothing is tried.
    """

    start: float
    target: float = 0.9
    confidence: float = 0.9
    growth: float = 1.6
    resolution: float = 1.15
    span: float = 32.0
    tries: int = 2

    def holds(self, probes: Sequence[Probe], objective: str) -> Holds:
        """By all runs at one rate together."""
        total = sum(probe.num_requests for probe in probes)
        low, high = wilson(sum(probe.num_good[objective] for probe in probes), total, self.confidence)
        if low >= self.target:
            return Holds.YES
        return Holds.NO if high < self.target else Holds.UNSURE

    def bracket(self, probes: Sequence[Probe], objective: str) -> Bracket:
        """What is known of an objective: its lowest rate that failed, and the highest below that held."""
        said = {rate: self.holds(runs, objective) for rate, runs in _by_rate(probes).items()}
        high = min((rate for rate, holds in said.items() if holds is Holds.NO), default=math.inf)
        low = max((rate for rate, holds in said.items() if holds is Holds.YES and rate < high), default=0.0)
        return Bracket(low, high)

    def next_rate(self, probes: Sequence[Probe], objectives: Sequence[str]) -> float | None:
        """The rate to try next, for the objective that is known least; None when all are known well enough, or cannot
        be known better."""
        wanted = [(self.bracket(probes, each).width, self._wanted(probes, each)) for each in objectives]
        open_ones = [(width, rate) for width, rate in wanted if rate is not None]
        return max(open_ones)[1] if open_ones else None

    def _wanted(self, probes: Sequence[Probe], objective: str) -> float | None:
        if not probes:
            return self.start
        bracket = self.bracket(probes, objective)
        if bracket.width <= self.resolution:
            return None
        if math.isinf(bracket.high):
            rate = (bracket.low or max(_by_rate(probes))) * self.growth
        elif bracket.low == 0:
            rate = bracket.high / self.growth**2
        else:
            rate = math.sqrt(bracket.low * bracket.high)
        unsure = [
            tried
            for tried, runs in _by_rate(probes).items()
            if bracket.low < tried < bracket.high and self.holds(runs, objective) is Holds.UNSURE
        ]
        if unsure:
            tried = min(unsure)
            if len(_by_rate(probes)[tried]) < self.tries:
                return tried
            rate = self._between(bracket, unsure)
        return rate if self.start / self.span <= rate <= self.start * self.span else None

    def _between(self, bracket: Bracket, unsure: Sequence[float]) -> float:
        """Unsure rates are the border's neighbourhood: it is approached from below, then from above; NaN when both
        sides are as near as the resolution."""
        lowest, highest = min(unsure), max(unsure)
        below = bracket.low or lowest / self.growth**2
        if lowest / below > self.resolution:
            return math.sqrt(lowest * below) if bracket.low else below
        if math.isinf(bracket.high):
            return highest * self.growth
        return math.sqrt(highest * bracket.high) if bracket.high / highest > self.resolution else math.nan


def wilson(num_good: int, num_all: int, confidence: float) -> tuple[float, float]:
    """Wilson's interval for the share of good ones; (0, 1) of none."""
    if not num_all:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, square = num_good / num_all, z * z / num_all
    middle = share + square / 2
    reach = z * math.sqrt(share * (1 - share) / num_all + square / (4 * num_all))
    return max(0.0, (middle - reach) / (1 + square)), min(1.0, (middle + reach) / (1 + square))


def _by_rate(probes: Sequence[Probe]) -> dict[float, list[Probe]]:
    runs: dict[float, list[Probe]] = {}
    for probe in probes:
        runs.setdefault(probe.rate, []).append(probe)
    return runs
