"""Where is the highest rate at which objectives hold? Chooses the next rate to try from those tried so far; pure.

An objective holds at a rate if at least a *target* share of the requests meet it, of which one is sure only to a point:
Wilson's interval of the share decides (E. B. Wilson, Journal of the American Statistical Association 22, 1927). Where
it holds both answers possible, the rate is tried again, a few times. One run of a rate says something of every
objective, so several are searched for together.

More requests per second are never easier to serve, so the share cannot rise with the rate. Where what was seen rises,
chance or a disturbance was at work: such neighbours are taken together until nothing rises any more (isotonic
regression by pooling adjacent violators; Barlow et al., Statistical Inference under Order Restrictions, 1972), and a
rate that fails below one that holds is tried again before either is believed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist

from twinpool.bench.reports.model import Found


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
class Pooled:
    """Neighbouring rates, ascending, whose runs are judged together. `at_odds`: one of the rates by itself fails below
    another that by itself holds; or the share rises more than chance allows, and not all were tried often enough."""

    rates: tuple[float, ...]
    num_requests: int
    num_good: int
    holds: Holds
    at_odds: bool


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
    tries: int = 3

    def holds(self, probes: Sequence[Probe], objective: str) -> Holds:
        """By all runs at one rate together."""
        total = sum(probe.num_requests for probe in probes)
        return self._judged(sum(probe.num_good[objective] for probe in probes), total)

    def _judged(self, num_good: int, num_requests: int) -> Holds:
        low, high = wilson(num_good, num_requests, self.confidence)
        if low >= self.target:
            return Holds.YES
        return Holds.NO if high < self.target else Holds.UNSURE

    def pooled(self, probes: Sequence[Probe], objective: str) -> list[Pooled]:
        """All rates that were tried, ascending, as few together as make the share of good ones fall throughout. Those
        that are at odds say nothing, however many they are."""
        by_rate = _by_rate(probes)
        counted = {
            rate: (sum(run.num_good[objective] for run in runs), sum(run.num_requests for run in runs))
            for rate, runs in by_rate.items()
        }
        blocks: list[tuple[list[float], int, int]] = []
        for rate in sorted(counted):
            rates, (good, count) = [rate], counted[rate]
            while blocks and blocks[-1][1] * count < good * blocks[-1][2]:
                below, more_good, more = blocks.pop()
                rates, good, count = below + rates, good + more_good, count + more
            blocks.append((rates, good, count))
        found = []
        for rates, good, count in blocks:
            alone = [self._judged(*counted[rate]) for rate in rates]
            at_odds = Holds.NO in alone and Holds.YES in alone[alone.index(Holds.NO) :]
            if min(len(by_rate[rate]) for rate in rates) < self.tries:
                at_odds = at_odds or _rises([wilson(*counted[rate], self.confidence) for rate in rates])
            holds = Holds.UNSURE if at_odds else self._judged(good, count)
            found.append(Pooled(tuple(rates), count, good, holds, at_odds))
        return found

    def bracket(self, probes: Sequence[Probe], objective: str) -> Bracket:
        """What is known of an objective: its lowest rate that fails, and the highest below that holds."""
        return _bracket(self.pooled(probes, objective))

    def found(self, probes: Sequence[Probe], objective: str) -> Found:
        """What these runs come to. That it holds at no rate is said only where the lowest that the search may try
        fails."""
        pooled = self.pooled(probes, objective)
        bracket = _bracket(pooled)
        if bracket.low > 0:
            return Found.HOLDS
        if self.at_odds(probes, objective):
            return Found.CONTRADICTORY
        is_sure_below = not any(
            each.rates[0] < bracket.high and each.holds is Holds.UNSURE for each in pooled
        )
        is_lowest = bracket.high <= self.start / self.span
        return Found.AT_NO_RATE if is_sure_below and is_lowest else Found.NOT_KNOWN

    def at_odds(self, probes: Sequence[Probe], objective: str) -> list[Pooled]:
        """Within the bracket, the rates whose runs contradict each other."""
        pooled = self.pooled(probes, objective)
        bracket = _bracket(pooled)
        return [each for each in pooled if each.at_odds and bracket.low < each.rates[-1] < bracket.high]

    def is_open(self, probes: Sequence[Probe], objective: str) -> bool:
        """Whether more runs are wanted of this objective."""
        return self._wanted(probes, objective) is not None

    def next_rate(self, probes: Sequence[Probe], objectives: Sequence[str]) -> float | None:
        """The rate to try next, for the objective that is known least; None when all are known well enough, or cannot
        be known better."""
        wanted = [(self.bracket(probes, each).width, self._wanted(probes, each)) for each in objectives]
        open_ones = [(width, rate) for width, rate in wanted if rate is not None]
        return max(open_ones)[1] if open_ones else None

    def _wanted(self, probes: Sequence[Probe], objective: str) -> float | None:
        if not probes:
            return self.start
        by_rate = _by_rate(probes)
        pooled = self.pooled(probes, objective)
        bracket = _bracket(pooled)
        if bracket.width <= self.resolution:
            return None
        if math.isinf(bracket.high):
            rate = (bracket.low or max(by_rate)) * self.growth
        elif bracket.low == 0:
            rate = self._lower(bracket.high)
        else:
            rate = math.sqrt(bracket.low * bracket.high)
        unsure = [
            each
            for each in pooled
            if each.holds is Holds.UNSURE and each.rates[-1] > bracket.low and each.rates[0] < bracket.high
        ]
        if unsure:
            # Those that fail below others that hold first, then what was tried least.
            again = [
                (not each.at_odds, len(by_rate[tried]), tried)
                for each in unsure
                for tried in each.rates
                if len(by_rate[tried]) < self.tries
            ]
            if again:
                return min(again)[-1]
            rate = self._between(bracket, [tried for each in unsure for tried in each.rates])
        return rate if self.start / self.span <= rate <= self.start * self.span else None

    def _lower(self, rate: float) -> float:
        """The next rate down, the lowest of all at last; NaN below that."""
        lowest = self.start / self.span
        return max(rate / self.growth**2, lowest) if rate > lowest else math.nan

    def _between(self, bracket: Bracket, unsure: Sequence[float]) -> float:
        """Unsure rates are the border's neighbourhood: it is approached from below, then from above; NaN when both
        sides are as near as the resolution."""
        lowest, highest = min(unsure), max(unsure)
        if bracket.low == 0:
            return self._lower(lowest)
        if lowest / bracket.low > self.resolution:
            return math.sqrt(lowest * bracket.low)
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


def _rises(shares: Sequence[tuple[float, float]]) -> bool:
    """Whether some interval lies wholly above an earlier one."""
    return any(low > high for place, (low, _) in enumerate(shares) for _, high in shares[:place])


def _bracket(pooled: Sequence[Pooled]) -> Bracket:
    high = min((each.rates[0] for each in pooled if each.holds is Holds.NO), default=math.inf)
    low = max(
        (each.rates[-1] for each in pooled if each.holds is Holds.YES and each.rates[-1] < high), default=0.0
    )
    return Bracket(low, high)


def _by_rate(probes: Sequence[Probe]) -> dict[float, list[Probe]]:
    runs: dict[float, list[Probe]] = {}
    for probe in probes:
        runs.setdefault(probe.rate, []).append(probe)
    return runs
