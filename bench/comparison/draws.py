"""Figures of requests that can be drawn again and again: what a bootstrap computes, for many draws at once.

A *draw* says how often each request counts; drawing with replacement makes some count twice and others not at all. A
figure is computed for many draws by one pass over its values in order, which is a hundred times faster than making the
lists that the draws stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float64]
Draws: TypeAlias = NDArray[np.int32]
"""[num_draws, num_requests]: how often each request counts."""
Statistic: TypeAlias = Callable[[Draws], Values]
"""One figure for each draw; NaN where it has none."""
_MOST_AT_ONCE = 250_000
"""Elements of an array that is made on the way."""


def once_each(count: int) -> Draws:
    """One draw: every request as it came."""
    return np.ones((1, count), np.int32)


def drawn(count: int, num_draws: int, rng: np.random.Generator) -> Draws:
    """So many draws with replacement, each of as many requests as there are."""
    return rng.multinomial(count, np.full(count, 1 / count), size=num_draws).astype(np.int32)


def percentile_of(values: Sequence[Sequence[float] | Values], percent: float) -> Statistic:
    """The percentile (nearest rank) of all values of the requests that are drawn; each may have any number of them."""
    ordered, owners = _in_order(values)

    def of(draws: Draws) -> Values:
        return _ranked(ordered, owners, draws, lambda total: [np.ceil(percent * total / 100)])

    return of


def median_of(values: Sequence[float | None]) -> Statistic:
    """The median of the requests' values; those without one are left out. Of an even number the mean of the middle two:
    one of them alone would lean to its side, and make equal arms look different."""
    ordered, owners = _in_order([[] if value is None else [value] for value in values])

    def of(draws: Draws) -> Values:
        return _ranked(ordered, owners, draws, lambda total: [(total + 1) // 2, total // 2 + 1])

    return of


def sum_of(values: Sequence[float]) -> Statistic:
    """The sum of the requests' values."""
    own = np.asarray(values, dtype=np.float64)

    def of(draws: Draws) -> Values:
        return draws @ own

    return of


def _in_order(values: Sequence[Sequence[float] | Values]) -> tuple[Values, NDArray[np.intp]]:
    """All values, ascending, and of which request each is."""
    pooled = np.concatenate([np.empty(0), *(np.asarray(own, dtype=np.float64) for own in values)])
    owners = np.repeat(np.arange(len(values)), [len(own) for own in values])
    order = np.argsort(pooled, kind="stable")
    return pooled[order], owners[order]


def _ranked(
    ordered: Values,
    owners: NDArray[np.intp],
    draws: Draws,
    ranks: Callable[[Draws], Sequence[NDArray[np.floating] | Draws]],
) -> Values:
    """For each draw the mean of the values at `ranks` (1 is the least) of as many as were drawn."""
    found = np.full(len(draws), math.nan)
    if not len(ordered):
        return found
    step = max(1, _MOST_AT_ONCE // len(ordered))
    for start in range(0, len(draws), step):
        # How many values there are up to each of them.
        below = np.cumsum(draws[start : start + step].take(owners, axis=1), axis=1, dtype=np.int32)
        total = below[:, -1]
        places = [
            np.argmax(below >= np.clip(rank, 1, np.maximum(total, 1))[:, None], axis=1)
            for rank in ranks(total)
        ]
        means = np.mean([ordered[place] for place in places], axis=0)
        found[start : start + step] = np.where(total > 0, means, math.nan)
    return found
