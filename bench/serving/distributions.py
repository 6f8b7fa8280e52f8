"""Percentiles and what else is said of many values.

The rule for percentiles is the nearest rank: the p-th percentile is the smallest value that at least p percent of the
values do not exceed. It is a value that occurred, and "p99 is at most x" says exactly that 99 % of the values are. The
fields named after `vllm bench serve` (`result.py`) interpolate instead, as numpy and vLLM do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float64]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of `count` values, at least one, in their unit. `std` is that of the values themselves (divided by `count`)."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentile(values: Sequence[float] | Values, percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed (nearest rank); NaN of none."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return float(ordered[_rank(len(ordered), percent)]) if len(ordered) else math.nan


def distribution(values: Sequence[float] | Values) -> Distribution | None:
    """What is said of the values; None of none."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if not len(ordered):
        return None
    p50, p90, p95, p99 = (float(ordered[_rank(len(ordered), percent)]) for percent in (50, 90, 95, 99))
    least, most = float(ordered[0]), float(ordered[-1])
    # A sum rounds: the mean of equal values must not come out beside them.
    mean = min(most, max(least, float(ordered.mean())))
    return Distribution(
        count=len(ordered), mean=mean, std=float(ordered.std()), min=least,
        p50=p50, p90=p90, p95=p95, p99=p99, max=most,
    )  # fmt: skip


def _rank(count: int, percent: float) -> int:
    """The index of the percentile among `count` values in order. The product first: it is exact, 0.07 × 100 is not."""
    return min(count - 1, max(0, math.ceil(percent * count / 100) - 1))
