"""How fast the machine was at each moment of a profile. Pure.

A machine whose cores are shared with others becomes slower and quicker for seconds at a time. Shapes are measured one
after the other, so each would keep what the machine did in its few moments; but steps right before and right after it,
whatever their shapes, tell of the same moments.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from typing import NamedTuple

NEAR_S = 3.0
"""Steps that are further apart do not tell of each other."""
NUM_NEAR = 4
"""As many before a step, and as many after it, tell of its moment."""
_ITERATIONS = 6


class Turn(NamedTuple):
    """One measured step: what it is, when it began, and its seconds."""

    kind: Hashable
    at_s: float
    seconds: float


def paces(turns: Sequence[Turn]) -> list[float]:
    """By how much steps near each turn, which are in the order of time, took longer than their kinds usually do. The
    turn itself has no say in its own. The mean is 1; without near steps it is 1, too."""
    found = [1.0] * len(turns)
    for _ in range(_ITERATIONS):
        usual_s = _usual_s(turns, found)
        ratios = [turn.seconds / usual_s[turn.kind] for turn in turns]
        found = [_median_near(turns, ratios, index) for index in range(len(turns))]
        mean = statistics.fmean(found) if found else 1.0
        found = [pace / mean for pace in found]
    return found


def _usual_s(turns: Sequence[Turn], found: Sequence[float]) -> dict[Hashable, float]:
    each: dict[Hashable, list[float]] = {}
    for turn, pace in zip(turns, found, strict=True):
        each.setdefault(turn.kind, []).append(turn.seconds / pace)
    return {kind: statistics.median(seconds) for kind, seconds in each.items()}


def _median_near(turns: Sequence[Turn], ratios: Sequence[float], index: int) -> float:
    at_s = turns[index].at_s
    near = [
        ratios[other]
        for other in range(max(0, index - NUM_NEAR), min(len(turns), index + NUM_NEAR + 1))
        if other != index and abs(turns[other].at_s - at_s) <= NEAR_S
    ]
    return statistics.median(near) if near else 1.0
