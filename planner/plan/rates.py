"""The highest rate at which an objective holds, by bisection over a geometric grid; pure.

Rates that are tried are always those of one grid, so that searches of other layouts and objectives meet the same
requests at the same rates. Between the last that holds and the first that does not, the rate is where a straight line
through both shares meets the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.bench.comparison.statistics import student_quantile
from twinpool.bench.reports.model import Interval

GRID = 1.03
"""From one rate of the grid to the next."""
_SPAN = 160
"""Grid steps below the start (a factor of 113) at which a search gives up."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate at which the objective holds, 0 if it was found to hold at none: it does at `low` and does not
    at `high`, of `num_tried`."""

    rate: float
    low: float
    high: float
    num_tried: int


def grid_rate(place: int) -> float:
    """The rate at a place of the grid."""
    return float(GRID**place)


def nearest_place(rate: float) -> int:
    """The place whose rate is nearest to one above 0."""
    return round(math.log(rate, GRID))


def highest_rate(
    share_at: Callable[[float], float], *, start: float, most: float, target: float, width: int = 2
) -> Capacity:
    """`share_at` says which share of requests meets the objective at a rate; it holds where that is `target`. Begins at
    `start`, above 0, goes on by `width` grid places, then twice as many and so on, and ends when `low` and `high` are
    `width` places from each other. No rate above `most` is tried: what holds there is said to hold up to it."""
    shares: dict[int, float] = {}

    def holds(place: int) -> bool:
        if place not in shares:
            shares[place] = share_at(grid_rate(place))
        return shares[place] >= target

    last = nearest_place(most)
    first = min(nearest_place(start), last)
    low = high = first
    reach = width
    if holds(first):
        while holds(high):
            if high >= last:
                return Capacity(most, grid_rate(high), math.inf, len(shares))
            low, high, reach = high, min(high + reach, last), 2 * reach
    else:
        while not holds(low):
            if low <= first - _SPAN:
                return Capacity(0.0, 0.0, grid_rate(low), len(shares))
            low, high, reach = max(low - reach, first - _SPAN), low, 2 * reach
    while high - low > width:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    above, below = shares[low] - target, target - shares[high]
    place = low + (high - low) * above / (above + below)
    return Capacity(float(GRID**place), grid_rate(low), grid_rate(high), len(shares))


def interval_of(values: Sequence[float], confidence: float) -> Interval:
    """Their mean with Student's interval; without ends if there are fewer than two. Rates are not below 0."""
    found = np.asarray(values, dtype=np.float64)
    center = float(found.mean())
    if len(found) < 2:
        return Interval(center)
    quantile = student_quantile(0.5 + confidence / 2, len(found) - 1)
    reach = quantile * float(found.std(ddof=1)) / math.sqrt(len(found))
    low = center - reach
    return Interval(center, max(0.0, low) if found.min() >= 0 else low, center + reach)


def change_of(before: Sequence[float], after: Sequence[float], confidence: float) -> Interval | None:
    """after / before − 1 of the same replications, paired: Student's interval of the logarithms. None if there is none,
    or a rate is 0."""
    if not before or len(before) != len(after) or min(*before, *after) <= 0:
        return None
    found = interval_of(np.log(np.asarray(after) / np.asarray(before)).tolist(), confidence)
    ends = [None if end is None else math.expm1(end) for end in (found.low, found.high)]
    return Interval(math.expm1(found.estimate), *ends)
