"""Curves through measured points that never fall."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from twinpool.errors import ConfigError


class Curve:
    """Linear between points; where those fall, their mean (isotonic regression). Several measurements of one x count
    as their median. Before the first point it stays at that; after the last it goes on as steeply as there, or as from
    the middle to the end, whichever is steeper."""

    __slots__ = ("_end_slope", "_slopes", "_xs", "_ys")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """Raises ConfigError without a point, or with one that is not positive."""
        repeated: dict[float, list[float]] = defaultdict(list)
        for x, y in points:
            repeated[x].append(y)
        if not repeated or min(min(values) for values in repeated.values()) <= 0:
            raise ConfigError(f"a curve needs points above 0, and has {dict(repeated)}")
        self._xs = sorted(repeated)
        self._ys = never_falling([median(repeated[x]) for x in self._xs])
        self._slopes = [
            (self._ys[i + 1] - self._ys[i]) / (self._xs[i + 1] - self._xs[i])
            for i in range(len(self._xs) - 1)
        ]
        self._end_slope = 0.0
        if self._slopes:
            middle = (len(self._xs) - 1) // 2
            chord = (self._ys[-1] - self._ys[middle]) / (self._xs[-1] - self._xs[middle])
            self._end_slope = max(self._slopes[-1], chord)

    def __call__(self, x: float) -> float:
        """The value at `x`."""
        if x <= self._xs[0]:
            return self._ys[0]
        i = bisect_right(self._xs, x) - 1
        slope = self._slopes[i] if i < len(self._slopes) else self._end_slope
        return self._ys[i] + slope * (x - self._xs[i])

    @property
    def points(self) -> list[tuple[float, float]]:
        """What it goes through."""
        return list(zip(self._xs, self._ys, strict=True))


def never_falling(values: Iterable[float]) -> list[float]:
    """The nearest values that never fall, in the sense of least squares: pool adjacent violators (Ayer et al. 1955)."""
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            count = counts.pop()
            mean = means.pop()
            means[-1] = (means[-1] * counts[-1] + mean * count) / (counts[-1] + count)
            counts[-1] += count
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]
