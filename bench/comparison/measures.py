"""What arms are measured and compared by: rows in the report's own types."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.bench.comparison.draws import Statistic, Values, median_of, once_each, percentile_of, sum_of
from twinpool.bench.comparison.statistics import (
    Change,
    Difference,
    Estimate,
    Repetition,
    Scale,
    compare,
    difference,
    estimate,
    log_ratio,
)
from twinpool.bench.comparison.statistics import Measure as FigureOf
from twinpool.bench.reports.model import Better, Comparison, Figure, Interval, Measure, Unit
from twinpool.bench.serving.metrics import RequestMetrics, request_metrics
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.slo import Slo


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One request of a run. `per_s` is what one request adds to the run's rates: 1 over its duration."""

    metrics: RequestMetrics
    is_good: bool
    per_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure of an arm, and how it is computed from the requests of a run."""

    measure: Measure
    statistic: FigureOf[Seen]

    def of(self, requests: Sequence[Seen]) -> float:
        """Of one run; NaN if it has none."""
        return float(self.statistic(requests)(once_each(len(requests)))[0])


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure, and how it changes between two runs of the same requests: in its unit, and as the logarithm of a
    ratio."""

    measured: Measured
    absolute: Change[Seen]
    relative: Change[Seen]


MOST_FACTOR = 10.0
"""An interval that is wider, either way, is not told."""
Value = Callable[[Seen], float | None]
"""Of one request; None if it did not complete, or has none."""


def _ttft(seen: Seen) -> float | None:
    return seen.metrics.ttft_from_intended_s if seen.metrics.is_completed else None


def _tpot(seen: Seen) -> float | None:
    return seen.metrics.tpot_s if seen.metrics.is_completed else None


def _e2e(seen: Seen) -> float | None:
    return seen.metrics.e2e_from_intended_s if seen.metrics.is_completed else None


def _time(name: str, statistic: FigureOf[Seen]) -> Measured:
    return Measured(Measure(name=name, unit=Unit.SECONDS, better=Better.LOWER), statistic)


def _percentile(percent: int, name: str, value: Value) -> Measured:
    def statistic(requests: Sequence[Seen]) -> Statistic:
        known = ([] if (found := value(seen)) is None else [found] for seen in requests)
        return percentile_of(list(known), percent)

    return _time(f"p{percent} {name}", statistic)


def _itl_percentile(percent: int) -> Measured:
    def statistic(requests: Sequence[Seen]) -> Statistic:
        none: Values = np.empty(0)
        return percentile_of(
            [seen.metrics.itls_s if seen.metrics.is_completed else none for seen in requests], percent
        )

    return _time(f"p{percent} ITL", statistic)


def _rate(name: str, unit: Unit, counts: Callable[[Seen], float]) -> Measured:
    def statistic(requests: Sequence[Seen]) -> Statistic:
        return sum_of([counts(seen) * seen.per_s for seen in requests])

    return Measured(Measure(name=name, unit=unit, better=Better.HIGHER), statistic)


def _of_runs(measured: Measured) -> Compared:
    """A figure of a whole run."""
    return Compared(measured, difference(measured.statistic), log_ratio(measured.statistic))


def _of_pairs(name: str, value: Value) -> Compared:
    """A time of each request, compared request by request; an arm's own value is the median."""

    def statistic(requests: Sequence[Seen]) -> Statistic:
        return median_of([value(seen) for seen in requests])

    def absolute(baseline: Sequence[Seen], other: Sequence[Seen]) -> Statistic:
        return median_of(_pairwise(baseline, other, lambda before, after: after - before))

    def relative(baseline: Sequence[Seen], other: Sequence[Seen]) -> Statistic:
        return median_of(_pairwise(baseline, other, _log_ratio))

    def _pairwise(
        baseline: Sequence[Seen], other: Sequence[Seen], change: Callable[[float, float], float | None]
    ) -> list[float | None]:
        pairs = ((value(one), value(same)) for one, same in zip(baseline, other, strict=True))
        return [None if before is None or after is None else change(before, after) for before, after in pairs]

    return Compared(_time(name, statistic), absolute, relative)


def _log_ratio(before: float, after: float) -> float | None:
    return math.log(after / before) if before > 0 and after > 0 else None


def _is_completed(seen: Seen) -> float:
    return float(seen.metrics.is_completed)


def _output_tokens(seen: Seen) -> float:
    return float(seen.metrics.record.output_tokens) if seen.metrics.is_completed else 0.0


P99_TTFT, P99_ITL = _percentile(99, "TTFT", _ttft), _itl_percentile(99)
GOODPUT = _rate("goodput", Unit.REQUESTS_PER_S, lambda seen: float(seen.is_good))
FIGURES = (
    _percentile(50, "TTFT", _ttft),
    P99_TTFT,
    _itl_percentile(50),
    P99_ITL,
    _percentile(50, "TPOT", _tpot),
    _percentile(99, "TPOT", _tpot),
    _percentile(50, "E2E", _e2e),
    _percentile(99, "E2E", _e2e),
    GOODPUT,
    _rate("requests completed", Unit.REQUESTS_PER_S, _is_completed),
    _rate("output tokens", Unit.TOKENS_PER_S, _output_tokens),
)
"""What is told of each arm. TTFT and E2E count from the intended send time."""
P99_ITL_CHANGE = _of_runs(P99_ITL)
COMPARISONS = (
    P99_ITL_CHANGE,
    _of_runs(P99_TTFT),
    _of_pairs("TTFT, each request", _ttft),
    _of_pairs("TPOT, each request", _tpot),
    _of_pairs("E2E, each request", _e2e),
    _of_runs(GOODPUT),
)
"""What arms are compared by; they share one error rate. Where it says "each request", an arm's value is the median, and
what is compared are the same requests on both."""


def seen(run: Run, slo: Slo) -> list[Seen]:
    """All requests of a run, by index."""
    per_s = 1 / run.duration_s if run.duration_s > 0 else 0.0
    found = (request_metrics(record) for record in run.requests)
    return [Seen(metrics, slo.is_met(metrics), per_s) for metrics in found]


def figures(runs: Sequence[Run], slo: Slo, confidence: float = 0.95) -> tuple[Figure, ...]:
    """An arm's own: the mean over its repetitions of each figure that all of them have, each with its own interval."""
    requests = [seen(run, slo) for run in runs]
    rows = [
        Figure(each.measure, _never_negative(estimate(requests, each.statistic, confidence=confidence)))
        for each in FIGURES
    ]
    return tuple(row for row in rows if math.isfinite(row.value.estimate))


def comparisons(
    baseline: str, other: str, pairs: Sequence[tuple[Run, Run]], slo: Slo, confidence: float = 0.95
) -> tuple[Comparison, ...]:
    """Every measure of two arms. `pairs` are their runs of the same requests, a pair for each repetition.

    All share one error rate, 1 − `confidence`. A measure without a ratio (a goodput of 0, no token at all) is left out.
    """
    repetitions = [Repetition(seen(before, slo), seen(after, slo)) for before, after in pairs]
    rows = []
    for compared in COMPARISONS:
        relative = _compared(repetitions, compared.relative, Scale.RATIO, confidence)
        if not math.isfinite(relative.value):
            continue
        statistic = compared.measured.statistic
        values = [
            _never_negative(estimate(runs, statistic, confidence=confidence))
            for runs in ([each.baseline for each in repetitions], [each.other for each in repetitions])
        ]
        absolute = _compared(repetitions, compared.absolute, Scale.DIFFERENCE, confidence)
        rows.append(
            Comparison(
                measure=compared.measured.measure,
                baseline=baseline,
                other=other,
                baseline_value=values[0],
                other_value=values[1],
                difference=_interval(absolute.value, absolute.low, absolute.high),
                change=_change(relative),
                num_pairs=sum(_both_completed(each) for each in repetitions),
                num_repetitions=len(repetitions),
            )
        )
    return tuple(rows)


def goodput_of_nothing(
    baseline: str, other: str, pairs: Sequence[tuple[Run, Run]], slo: Slo, confidence: float = 0.95
) -> str:
    """A sentence on a goodput that has no ratio, because one arm had none in some repetition; else empty."""
    repetitions = [Repetition(seen(before, slo), seen(after, slo)) for before, after in pairs]
    values = [(GOODPUT.of(each.baseline), GOODPUT.of(each.other)) for each in repetitions]
    if all(before > 0 and after > 0 for before, after in values):
        return ""
    if not any(before > 0 or after > 0 for before, after in values):
        return f"goodput: no request of {baseline} or {other} met the SLO"
    found = _compared(repetitions, difference(GOODPUT.statistic), Scale.DIFFERENCE, confidence)
    none = [
        name for name, each in zip((baseline, other), zip(*values, strict=True), strict=True) if 0.0 in each
    ]
    ends = f" [{found.low:+.3g}, {found.high:+.3g}]" if math.isfinite(found.high) else ""
    return (
        f"goodput has no ratio, as {' and '.join(none)} had a repetition without any: {other} − {baseline} is "
        f"{found.value:+.3g}{ends} requests/s"
    )


def p99_itl_half_width(pairs: Sequence[tuple[Run, Run]], slo: Slo) -> float:
    """How well the change of the p99 ITL is known: half of its interval, as a share of the baseline's; infinite if it
    has none."""
    repetitions = [Repetition(seen(before, slo), seen(after, slo)) for before, after in pairs]
    return _compared(repetitions, P99_ITL_CHANGE.relative, Scale.RATIO, 0.95).half_width


def _compared(
    repetitions: Sequence[Repetition[Seen]], change: Change[Seen], scale: Scale, confidence: float
) -> Difference:
    return compare(repetitions, change, scale, num_measures=len(COMPARISONS), confidence=confidence)


def _both_completed(repetition: Repetition[Seen]) -> int:
    return sum(
        before.metrics.is_completed and after.metrics.is_completed
        for before, after in zip(repetition.baseline, repetition.other, strict=True)
    )


def _never_negative(found: Estimate) -> Interval:
    """Of what cannot be negative: an interval that reaches below 0, or to twice the value, is none."""
    if found.low < 0 or found.high > 2 * found.value:
        return Interval(found.value)
    return _interval(found.value, found.low, found.high)


def _change(relative: Difference) -> Interval:
    """An interval that does not even know the order of magnitude is none."""
    if relative.half_width > math.log(MOST_FACTOR):
        return Interval(relative.value - 1)
    return _interval(relative.value - 1, relative.low - 1, relative.high - 1)


def _interval(value: float, low: float, high: float) -> Interval:
    """Ends that are not known are None."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return Interval(value)
    return Interval(value, low, high)
