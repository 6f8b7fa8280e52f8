"""What two arms are compared by, and what the comparison says: one row for each measure, in the report's own type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twinpool.bench.comparison.statistics import (
    Change,
    Repetition,
    Scale,
    compare,
    difference,
    log_ratio,
    median_paired_difference,
    median_paired_log_ratio,
)
from twinpool.bench.reports.model import Better, Comparison, Figure, Interval, Measure, Unit
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.metrics import RequestMetrics, request_metrics
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.slo import Slo


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One request of a run. `goodput_share` is what it adds to the run's goodput if it met the SLO: requests per second
    over the number of requests."""

    metrics: RequestMetrics
    is_good: bool
    goodput_share: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One measure: its name and unit, how it is computed from the requests of a run (NaN if it cannot be), and how it
    changes between two runs of the same requests: in its unit, and as the logarithm of a ratio."""

    measure: Measure
    of: Callable[[Sequence[Seen]], float]
    absolute: Change[Seen]
    relative: Change[Seen]


Value = Callable[[Seen], float | None]
"""Of one request; None if it did not complete, or has none."""


def _of_runs(name: str, unit: Unit, better: Better, of: Callable[[Sequence[Seen]], float]) -> Compared:
    """A figure of a whole run."""
    return Compared(Measure(name=name, unit=unit, better=better), of, difference(of), log_ratio(of))


def _of_pairs(name: str, value: Value) -> Compared:
    """A time of each request, compared request by request."""
    measure = Measure(name=name, unit=Unit.SECONDS, better=Better.LOWER)
    return Compared(
        measure, _percentile(value, 50), median_paired_difference(value), median_paired_log_ratio(value)
    )


def _percentile(value: Value, percent: float) -> Callable[[Sequence[Seen]], float]:
    def of(requests: Sequence[Seen]) -> float:
        known = [found for seen in requests if (found := value(seen)) is not None]
        return percentile(known, percent) if known else math.nan

    return of


def _itl_percentile(percent: float) -> Callable[[Sequence[Seen]], float]:
    def of(requests: Sequence[Seen]) -> float:
        gaps = (seen.metrics.itls_s for seen in requests if seen.metrics.is_completed)
        pooled = np.concatenate([np.empty(0), *gaps])
        return percentile(pooled, percent) if len(pooled) else math.nan

    return of


def _goodput(requests: Sequence[Seen]) -> float:
    return sum(seen.goodput_share for seen in requests if seen.is_good)


def _ttft(seen: Seen) -> float | None:
    return seen.metrics.ttft_from_intended_s if seen.metrics.is_completed else None


def _tpot(seen: Seen) -> float | None:
    return seen.metrics.tpot_s if seen.metrics.is_completed else None


def _e2e(seen: Seen) -> float | None:
    return seen.metrics.e2e_from_intended_s if seen.metrics.is_completed else None


GOODPUT = _of_runs("goodput", Unit.REQUESTS_PER_S, Better.HIGHER, _goodput)
P99_ITL = _of_runs("p99 ITL", Unit.SECONDS, Better.LOWER, _itl_percentile(99))
MEASURES = (
    P99_ITL,
    _of_runs("p99 TTFT", Unit.SECONDS, Better.LOWER, _percentile(_ttft, 99)),
    _of_pairs("TTFT, each request", _ttft),
    _of_pairs("TPOT, each request", _tpot),
    _of_pairs("E2E, each request", _e2e),
)
"""Without goodput, which needs an SLO. TTFT and E2E count from the intended send time. Where it says "each request", an
arm's value is the median, and what is compared are the same requests on both."""


def measures(slo: Slo | None) -> tuple[Compared, ...]:
    """What is compared; they share one error rate."""
    return MEASURES if slo is None else (*MEASURES, GOODPUT)


def seen(run: Run, slo: Slo | None) -> list[Seen]:
    """All requests of a run, by index."""
    per_request = 1 / run.duration_s if run.duration_s > 0 else 0.0
    found = (request_metrics(record) for record in run.requests)
    return [Seen(metrics, slo is not None and slo.is_met(metrics), per_request) for metrics in found]


def figures(runs: Sequence[Run], slo: Slo | None) -> tuple[Figure, ...]:
    """An arm's own figures: of each measure the mean over its repetitions, with the least and the greatest of them."""
    requests = [seen(run, slo) for run in runs]
    rows = []
    for compared in measures(slo):
        values = [compared.of(each) for each in requests]
        if values and all(math.isfinite(value) for value in values):
            rows.append(Figure(compared.measure, _range(values)))
    return tuple(rows)


def comparisons(
    baseline: str, other: str, pairs: Sequence[tuple[Run, Run]], slo: Slo | None, confidence: float = 0.95
) -> tuple[Comparison, ...]:
    """Every measure of two arms. `pairs` are their runs of the same requests, a pair for each repetition.

    All share one error rate, 1 − `confidence`. A measure without a ratio (a goodput of 0, no token at all) is left out.
    """
    repetitions = [Repetition(seen(before, slo), seen(after, slo)) for before, after in pairs]
    wanted = measures(slo)
    rows = []
    for compared in wanted:
        absolute, relative = (
            compare(repetitions, change, scale, num_measures=len(wanted), confidence=confidence)
            for change, scale in (
                (compared.absolute, Scale.DIFFERENCE),
                (compared.relative, Scale.RATIO),
            )
        )
        if not math.isfinite(relative.value):
            continue
        rows.append(
            Comparison(
                measure=compared.measure,
                baseline=baseline,
                other=other,
                baseline_value=_range([compared.of(each.baseline) for each in repetitions]),
                other_value=_range([compared.of(each.other) for each in repetitions]),
                difference=_interval(absolute.value, absolute.low, absolute.high),
                change=_interval(relative.value - 1, relative.low - 1, relative.high - 1),
                num_pairs=sum(_both_completed(each) for each in repetitions),
                num_repetitions=len(repetitions),
            )
        )
    return tuple(rows)


def _both_completed(repetition: Repetition[Seen]) -> int:
    return sum(
        before.metrics.is_completed and after.metrics.is_completed
        for before, after in zip(repetition.baseline, repetition.other, strict=True)
    )


def _range(values: Sequence[float]) -> Interval:
    return Interval(float(np.mean(values)), min(values), max(values))


def _interval(value: float, low: float, high: float) -> Interval:
    """Ends that are not known are None."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return Interval(value)
    return Interval(value, low, high)
