"""What steps take on average, on a machine that is slow and quick by turns. Pure.

A machine whose cores are shared with others becomes up to twice as slow for seconds at a time. Which of a shape's few
turns fell into such a while is luck, so their mean tells of that luck as much as of the shape; its quickest turns do
not, they agree within some percent. And a slow while slows all shapes down alike, but for those that wait for memory
more than others, which are the short ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

QUICKEST = 0.25
"""This share of a kind's turns tells how quick it is."""
Kind = TypeVar("Kind", bound=Hashable)


def usual_s(turns_s: Mapping[Kind, Sequence[float]]) -> dict[Kind, float]:
    """The mean that each kind's turns would have with as many slow ones among them as all kinds have: the mean of its
    quickest, times what means are longer than those, by a line over the logarithm of seconds. Each kind has a turn."""
    kinds = list(turns_s)
    quick = np.log([_mean_of_quickest(turns_s[kind]) for kind in kinds])
    longer = np.log([statistics.fmean(turns_s[kind]) for kind in kinds]) - quick
    if not kinds:
        return {}
    beside = quick - quick.mean()
    slope = float(beside @ longer) / (float(beside @ beside) or 1.0)
    found = quick + longer.mean() + slope * beside
    return {kind: math.exp(each) for kind, each in zip(kinds, found.tolist(), strict=True)}


def _mean_of_quickest(seconds: Sequence[float]) -> float:
    return statistics.fmean(sorted(seconds)[: max(1, round(QUICKEST * len(seconds)))])
