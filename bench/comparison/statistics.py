"""Whether two arms differ, and by how much: intervals from repetitions in which both had the same requests.

Two sources of chance are kept apart. *Which requests came* is answered by the bootstrap: repetitions are drawn with
replacement and, within each, pairs of the same request on both arms. *How a whole run went* (where memory lay, what
else the machine did) shows between repetitions only, of which there are few; a percentile bootstrap of few clusters is
too narrow (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69, 2015). So the
interval also covers Student's, over one difference for each repetition. Several measures share one error rate
(Bonferroni): with no true difference anywhere, all of them together say so in 95 of 100 comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item")
Measure = Callable[[Sequence[Item]], float]
"""One figure of an arm's requests; NaN if it cannot be computed from them."""
Change = Callable[[Sequence[Item], Sequence[Item]], float]
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
    if not repetitions:
        raise ValueError("no repetition; wanted: at least one")
    for repetition in repetitions:
        if len(repetition.baseline) != len(repetition.other):
            raise ValueError(
                f"{len(repetition.baseline)} requests on one arm, {len(repetition.other)} on the other; wanted: pairs"
            )
    level = 1 - (1 - confidence) / num_measures
    found = np.array([change(repetition.baseline, repetition.other) for repetition in repetitions])
    number = len(found)
    center = float(found.mean())
    low, high = -math.inf, math.inf
    if number > 1 and np.isfinite(found).all():
        reach = student_quantile(0.5 + level / 2, number - 1) * float(found.std(ddof=1)) / math.sqrt(number)
        low, high = center - reach, center + reach
        drawn = _resampled(repetitions, change, seed, num_resamples)
        drawn = drawn[np.isfinite(drawn)]
        if len(drawn):
            edges = np.quantile(drawn, (0.5 - level / 2, 0.5 + level / 2))
            low, high = min(low, float(edges[0])), max(high, float(edges[1]))
    if scale is Scale.RATIO:
        center, low, high = (_exp(value) for value in (center, low, high))
    return Difference(scale, center, low, high, level, number)


def log_ratio(measure: Measure[Item]) -> Change[Item]:
    """ln(other / baseline) of a figure; NaN unless both are above 0."""

    def change(baseline: Sequence[Item], other: Sequence[Item]) -> float:
        before, after = measure(baseline), measure(other)
        return math.log(after / before) if before > 0 and after > 0 else math.nan

    return change


def difference(measure: Measure[Item]) -> Change[Item]:
    """other − baseline of a figure."""

    def change(baseline: Sequence[Item], other: Sequence[Item]) -> float:
        return measure(other) - measure(baseline)

    return change


def median_paired_difference(value: Callable[[Item], float | None]) -> Change[Item]:
    """The median over requests of other − baseline; requests without a value on either arm are left out."""
    return _median_over_pairs(value, lambda before, after: after - before)


def median_paired_log_ratio(value: Callable[[Item], float | None]) -> Change[Item]:
    """The median over requests of ln(other / baseline), left out unless both are above 0."""
    return _median_over_pairs(
        value, lambda before, after: math.log(after / before) if before > 0 and after > 0 else None
    )


def _median_over_pairs(
    value: Callable[[Item], float | None], change: Callable[[float, float], float | None]
) -> Change[Item]:
    def median(baseline: Sequence[Item], other: Sequence[Item]) -> float:
        known = []
        for one, same in zip(baseline, other, strict=True):
            before, after = value(one), value(same)
            if before is not None and after is not None and (found := change(before, after)) is not None:
                known.append(found)
        return float(np.median(known)) if known else math.nan

    return median


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


def _resampled(
    repetitions: Sequence[Repetition[Item]],
    change: Change[Item],
    seed: int,
    num_resamples: int,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rng = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for number in range(num_resamples):
        changes = []
        for chosen in rng.integers(len(repetitions), size=len(repetitions)):
            repetition = repetitions[chosen]
            pairs = rng.integers(len(repetition.baseline), size=len(repetition.baseline))
            baseline = [repetition.baseline[i] for i in pairs]
            other = [repetition.other[i] for i in pairs]
            changes.append(change(baseline, other))
        means[number] = np.mean(changes)
    return means


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
