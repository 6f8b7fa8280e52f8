"""The highest rate at which an objective holds, by bisection over a geometric grid; pure.

Rates that are tried are always those of one grid, so that searches of other layouts and objectives meet the same
requests at the same rates. Between the last that holds and the first that does not, the rate is where a straight line
through both shares meets the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    share_at: Callable[[float], float],
    *,
    start: float,
    most: float,
    target: float,
    width: int = 2,
    known: Mapping[float, float] | None = None,
) -> Capacity:
    """`share_at` says which share of requests meets the objective at a rate; it holds where that is `target`. Begins at
    `start`, above 0, goes on by `width` grid places, then twice as many and so on, and ends when `low` and `high` are
    `width` places from each other. No rate above `most` is tried: what holds there is said to hold up to it. `known`
    are shares by rate: the search stays within what they enclose, and asks for none of them."""
    last = nearest_place(most)
    place = min(nearest_place(start), last)
    least = place - _SPAN
    shares = {nearest_place(rate): share for rate, share in (known or {}).items()}
    num_known = len(shares)
    within = {at: share >= target for at, share in shares.items() if at <= last}
    low = max((at for at, holds in within.items() if holds), default=None)
    high = min((at for at, holds in within.items() if not holds and (low is None or at > low)), default=None)
    reach, direction, is_halving = width, 0, False
    while low is None or high is None or high - low > width:
        if low is not None and low >= last:
            return Capacity(most, grid_rate(low), math.inf, len(shares) - num_known)
        if high is not None and high <= least:
            return Capacity(0.0, 0.0, grid_rate(high), len(shares) - num_known)
        place = max(place, least if low is None else low + 1)
        place = min(place, last if high is None else high - 1)
        shares[place] = share_at(grid_rate(place))
        step = 1 if shares[place] >= target else -1
        low, high = (place, high) if step > 0 else (low, place)
        direction = direction or step
        is_halving = is_halving or step != direction
        place += step * reach
        reach *= 2
        if low is not None and high is not None:
            middle = (low + high) // 2
            place = middle if is_halving else min(place, middle) if step > 0 else max(place, middle)
    above, below = shares[low] - target, target - shares[high]
    rate = float(GRID ** (low + (high - low) * above / (above + below)))
    return Capacity(rate, grid_rate(low), grid_rate(high), len(shares) - num_known)


def interval_of(values: Sequence[float], confidence: float) -> Interval:
    """Their mean with Student's interval; without ends if there are fewer than two."""
    found = np.asarray(values, dtype=np.float64)
    center = float(found.mean())
    if len(found) < 2:
        return Interval(center)
    quantile = student_quantile(0.5 + confidence / 2, len(found) - 1)
    reach = quantile * float(found.std(ddof=1)) / math.sqrt(len(found))
    return Interval(center, center - reach, center + reach)


def rate_interval(rates: Sequence[float], confidence: float) -> Interval:
    """Likewise of rates, which are not below 0."""
    found = interval_of(rates, confidence)
    return found if found.low is None else Interval(found.estimate, max(0.0, found.low), found.high)


def change_of(before: Sequence[float], after: Sequence[float], confidence: float) -> Interval | None:
    """after / before − 1 of the same replications, paired: Student's interval of the logarithms. None if there is none,
    or a rate is 0."""
    if not before or len(before) != len(after) or min(*before, *after) <= 0:
        return None
    found = interval_of(np.log(np.asarray(after) / np.asarray(before)).tolist(), confidence)
    ends = [None if end is None else math.expm1(end) for end in (found.low, found.high)]
    return Interval(math.expm1(found.estimate), *ends)
