"""Scales of charts: where a value lies between the two ends of an axis, and which ticks say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
LEVELS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)
"""Shares that a probability axis marks."""
_STEPS = (1, 2, 5, 10)
_DENSE_DECADES = 2.2
"""Over fewer decades 2 and 5 get ticks too."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`place` maps a value to 0 (the axis's beginning) to 1 (its end), clipped; `ticks` are values with labels."""

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def linear_axis(high: float, label: Callable[[float], str], num_ticks: int = 5) -> Axis:
    """From 0 to at least `high`, at whole steps of 1, 2 or 5 times a power of ten."""
    high = high if high > 0 else 1.0
    raw = high / num_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in _STEPS if each * power >= raw * (1 - 1e-9))
    count = math.ceil(high / step - 1e-9)
    ticks = tuple((n * step, label(n * step)) for n in range(count + 1))
    return Axis(lambda value: _clip(value / (count * step)), ticks)


def log_axis(low: float, high: float, label: Callable[[float], str]) -> Axis:
    """From `low` to `high`, both above 0, with a little room around."""
    start, end = math.log10(low) - 0.02, math.log10(high) + 0.02
    if end - start < 0.3:
        middle = (start + end) / 2
        start, end = middle - 0.15, middle + 0.15
    factors = (1, 2, 5) if end - start < _DENSE_DECADES else (1,)
    powers = range(math.floor(start), math.ceil(end) + 1)
    values = [factor * 10.0**power for power in powers for factor in factors]
    ticks = tuple((value, label(value)) for value in values if start <= math.log10(value) <= end)
    return Axis(lambda value: _clip((math.log10(value) - start) / (end - start)) if value > 0 else 0.0, ticks)


def probability_axis(num_values: int) -> Axis:
    """Shares of `num_values` values on the scale of normal quantiles: both tails are as wide as the middle, and what is
    lognormal is a straight line over a logarithmic axis."""
    least = 0.5 / max(num_values, 2)
    end = -normal_quantile(least)
    ticks = tuple((level, f"{level * 100:g} %") for level in LEVELS if least < level < 1 - least)
    return Axis(
        lambda share: _clip((normal_quantile(min(max(share, least), 1 - least)) + end) / (2 * end)), ticks
    )


def normal_quantile(share: float) -> float:
    """Where so much of the standard normal distribution is below; `share` is above 0 and below 1."""
    return _NORMAL.inv_cdf(share)


def ecdf(values: Sequence[float], most: int = 400) -> list[tuple[float, float]]:
    """Up to `most` points (value, share of the values that do not exceed it), ascending, the largest among them. Where
    points are left out, the rest lie evenly on the scale of normal quantiles, so no tail is thinned."""
    ordered = sorted(values)
    count = len(ordered)
    if count <= most:
        ranks = range(count)
    else:
        end = -normal_quantile(0.5 / count)
        shares = (_NORMAL.cdf(end * (2 * n / (most - 1) - 1)) for n in range(most))
        ranks = sorted({min(count - 1, int(share * count)) for share in shares} | {0, count - 1})  # type: ignore[assignment]
    return [(ordered[rank], (rank + 1) / count) for rank in ranks]


def steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same curve with corners: at each value it rises at once, from the share of the values below. So it holds
    every percentile by nearest rank, however few the values are."""
    below = [0.0, *(share for _, share in points)]
    return [
        corner
        for (value, share), before in zip(points, below, strict=False)
        for corner in ((value, before), (value, share))
    ]


def _clip(place: float) -> float:
    return min(1.0, max(0.0, place))
