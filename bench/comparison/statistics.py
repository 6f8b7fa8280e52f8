"""Whether two arms differ, and by how much: intervals from repetitions in which both had the same requests.

Two sources of chance are kept apart. *Which requests came* is answered by the bootstrap: repetitions are drawn with
replacement and, within each, pairs of the same request on both arms. *How a whole run went* (where memory lay, what
else the machine did) shows between repetitions only, of which there are few; a percentile bootstrap of few clusters is
too narrow (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69, 2015). So the
interval also covers Student's, over one value for each repetition. Several measures share one error rate (Bonferroni):
with no true difference anywhere, all of them together say so in 95 of 100 comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np

from twinpool.bench.comparison.draws import Draws, Statistic, Values, drawn, once_each

Item = TypeVar("Item")
Measure = Callable[[Sequence[Item]], Statistic]
"""One figure of an arm's requests; NaN if it cannot be computed from them."""
Change = Callable[[Sequence[Item], Sequence[Item]], Statistic]
"""How one figure differs between an arm's requests and those of another, pair by pair in the same order."""
NUM_RESAMPLES = 1000


class Scale(StrEnum):
    """How two values are compared."""

    RATIO = "ratio"
    """other / baseline; both above 0."""
    DIFFERENCE = "difference"
    """other − baseline."""


class Verdict(StrEnum):
    """What the interval allows to say of the other arm."""

    LOWER = "lower"
    HIGHER = "higher"
    NOT_SHOWN = "no difference shown"


@dataclass(frozen=True, slots=True)
class Repetition(Generic[Item]):
    """The same requests on two arms: `baseline[i]` and `other[i]` are one request."""

    baseline: Sequence[Item]
    other: Sequence[Item]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval, which is infinite where there is one repetition, or a value that is not finite."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one measure. `value`, `low` and `high` are ratios or differences, by `scale`; the interval is infinite where
    there is one repetition, or a value that has no ratio."""

    scale: Scale
    value: float
    low: float
    high: float
    level: float
    num_repetitions: int

    @property
    def verdict(self) -> Verdict:
        """Whether the interval leaves out "equal"."""
        equal = 1.0 if self.scale is Scale.RATIO else 0.0
        if self.low > equal:
            return Verdict.HIGHER
        return Verdict.LOWER if self.high < equal else Verdict.NOT_SHOWN

    @property
    def half_width(self) -> float:
        """Half of the interval: of ratios in logarithms, so about a share of the value."""
        if self.scale is Scale.DIFFERENCE:
            return (self.high - self.low) / 2
        return (math.log(self.high) - math.log(self.low)) / 2 if self.low > 0 else math.inf


def compare(
    repetitions: Sequence[Repetition[Item]],
    change: Change[Item],
    scale: Scale,
    *,
    num_measures: int = 1,
    confidence: float = 0.95,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> Difference:
    """How the arms differ: `change` of a repetition, averaged. With Scale.RATIO changes are logarithms of ratios.

    `num_measures` that are compared on the same runs share the error 1 − `confidence`. Where a change is NaN the value
    is NaN too, and the interval infinite.

    Raises:
        ValueError: no repetition, or one whose arms have not equally many requests.
    """
    for repetition in repetitions:
        if len(repetition.baseline) != len(repetition.other):
            raise ValueError(
                f"{len(repetition.baseline)} requests on one arm, {len(repetition.other)} on the other; wanted: pairs"
            )
    level = 1 - (1 - confidence) / num_measures
    changes = [change(repetition.baseline, repetition.other) for repetition in repetitions]
    sizes = [len(repetition.baseline) for repetition in repetitions]
    found = _averaged(changes, sizes, level, seed, num_resamples)
    value, low, high = found.value, found.low, found.high
    if scale is Scale.RATIO:
        value, low, high = (_exp(each) for each in (value, low, high))
    return Difference(scale, value, low, high, level, len(repetitions))


def estimate(
    runs: Sequence[Sequence[Item]],
    measure: Measure[Item],
    *,
    confidence: float = 0.95,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """One arm's figure, averaged over its repetitions. Raises ValueError if there is none."""
    measures = [measure(requests) for requests in runs]
    return _averaged(measures, [len(requests) for requests in runs], confidence, seed, num_resamples)


def log_ratio(measure: Measure[Item]) -> Change[Item]:
    """ln(other / baseline) of a figure; NaN unless both are above 0."""

    def change(baseline: Sequence[Item], other: Sequence[Item]) -> Statistic:
        before, after = measure(baseline), measure(other)

        def of(draws: Draws) -> Values:
            return _log(after(draws)) - _log(before(draws))

        return of

    return change


def difference(measure: Measure[Item]) -> Change[Item]:
    """other − baseline of a figure."""

    def change(baseline: Sequence[Item], other: Sequence[Item]) -> Statistic:
        before, after = measure(baseline), measure(other)

        def of(draws: Draws) -> Values:
            return after(draws) - before(draws)

        return of

    return change


def student_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t with `degrees` of freedom stays below with `probability`, in (0, 1)."""
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _student_below(high, degrees) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, degrees) < probability else (low, middle)
    return high


def _student_below(t: float, degrees: int) -> float:
    """P(T < t) for t ≥ 0: the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    share = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + share / 2


def _averaged(
    statistics: Sequence[Statistic], sizes: Sequence[int], level: float, seed: int, num_resamples: int
) -> Estimate:
    """The mean of one value for each repetition, and the wider of both intervals around it. `sizes[r]` is the number of
    requests, or pairs of them, that `statistics[r]` is of."""
    if not statistics:
        raise ValueError("no repetition; wanted: at least one")
    pairs = zip(statistics, sizes, strict=True)
    found = np.array([statistic(once_each(size))[0] for statistic, size in pairs])
    number = len(found)
    center = float(found.mean())
    if number < 2 or not np.isfinite(found).all():
        return Estimate(center, -math.inf, math.inf)
    reach = student_quantile(0.5 + level / 2, number - 1) * float(found.std(ddof=1)) / math.sqrt(number)
    low, high = center - reach, center + reach
    means = _resampled(statistics, sizes, seed, num_resamples)
    means = means[np.isfinite(means)]
    if len(means):
        edges = np.quantile(means, (0.5 - level / 2, 0.5 + level / 2))
        low, high = min(low, float(edges[0])), max(high, float(edges[1]))
    return Estimate(center, low, high)


def _resampled(
    statistics: Sequence[Statistic], sizes: Sequence[int], seed: int, num_resamples: int
) -> Values:
    """Means over repetitions that are drawn with replacement, as are the requests within each."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(statistics), size=(num_resamples, len(statistics)))
    values = np.empty(chosen.shape)
    for number, (statistic, size) in enumerate(zip(statistics, sizes, strict=True)):
        is_chosen = chosen == number
        values[is_chosen] = statistic(drawn(size, int(is_chosen.sum()), rng))
    means: Values = values.mean(axis=1)
    return means


def _log(values: Values) -> Values:
    return np.log(values, out=np.full(values.shape, math.nan), where=values > 0)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
