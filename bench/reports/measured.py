"""What an arm's runs come to when they are taken together: the values behind charts, tables and its figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from twinpool.bench.reports.model import ArmReport, Better, Figure, Interval, Measure, Unit
from twinpool.bench.serving.distributions import Distribution, distribution
from twinpool.bench.serving.metrics import RequestMetrics, request_metrics
from twinpool.bench.serving.record import RequestRecord, Run
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import Cohort, Summary, Window, WindowKind, summarize
from twinpool.bench.serving.verdict import load_warnings


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """An arm's measured requests, of all its runs together; `number` is the arm's place in the report. The rates of
    `summary` mean nothing: its runs were not one."""

    arm: ArmReport
    number: int
    requests: tuple[RequestMetrics, ...]
    summary: Summary

    @property
    def cohort(self) -> Cohort:
        """All of them."""
        return self.summary.cohort

    @property
    def ttft_s(self) -> list[float]:
        """Of completed requests, from the intended send time."""
        found = (each.ttft_from_intended_s for each in self.requests if each.is_completed)
        return [value for value in found if value is not None]

    @property
    def itl_s(self) -> list[float]:
        """Every gap of completed requests."""
        gaps = [each.itls_s for each in self.requests if each.is_completed]
        found: list[float] = np.concatenate([np.empty(0), *gaps]).tolist()
        return found

    @property
    def send_lags_s(self) -> list[float]:
        """How late the senders of all runs were, of all their requests."""
        return [lag for run in self.arm.runs for sender in run.senders for lag in sender.send_lags_s]

    @property
    def distributions(self) -> list[tuple[str, Distribution]]:
        """In seconds, of each metric that there is."""
        cohort = self.cohort
        named = (
            ("TTFT, from the intended send time", cohort.ttft_from_intended),
            ("TTFT, from the send", cohort.ttft),
            ("ITL", cohort.itl),
            ("gap between chunks", cohort.chunk_gap if cohort.num_shared_tokens else None),
            ("TPOT", cohort.tpot),
            ("E2E, from the intended send time", cohort.e2e_from_intended),
            ("wait before the send", cohort.wait_before_send),
            ("send lag (the load generator's own)", distribution(self.send_lags_s)),
        )
        return [(name, found) for name, found in named if found is not None]


def measured(arms: Sequence[ArmReport]) -> list[Measured]:
    """Of each arm, in their order."""
    return [_together(number, arm) for number, arm in enumerate(arms)]


def _together(number: int, arm: ArmReport) -> Measured:
    records = tuple(_records(arm))
    # A window that takes in all of them: each repetition's own has been applied.
    everything = Window(kind=WindowKind.CLOSED_COHORT, from_s=float("-inf"), to_s=float("inf"))
    pooled = Run(started_at="", duration_s=0.0, requests=records, senders=(), settings={})
    return Measured(arm, number, tuple(map(request_metrics, records)), summarize(pooled, window=everything))


def _records(arm: ArmReport) -> list[RequestRecord]:
    if not arm.windows:
        return [record for run in arm.runs for record in run.requests]
    pairs = zip(arm.runs, arm.windows, strict=True)
    return [record for run, window in pairs for record in window.measured(run.requests)]


def arm_of(
    name: str,
    runs: Sequence[Run],
    slo: Slo | None = None,
    windows: Sequence[Window] = (),
    *,
    description: str = "",
    command: str = "",
    settings: Mapping[str, Any] | None = None,
    not_a_result: Sequence[str] = (),
) -> ArmReport:
    """An arm with the figures of its runs: percentiles of all their requests together, means of the runs' rates.

    Raises:
        ConfigError: a run has no duration.
    """
    bare = ArmReport(
        name=name,
        description=description,
        command=command,
        runs=tuple(runs),
        windows=tuple(windows),
        settings=dict(settings or {}),
        warnings=tuple(
            f"repetition {number}: {words}" if len(runs) > 1 else words
            for number, run in enumerate(runs, 1)
            for words in (*(("interrupted",) if run.was_interrupted else ()), *load_warnings(run))
        ),
        not_a_result=tuple(not_a_result),
    )
    own: Sequence[Window | None] = windows or [None] * len(runs)
    each = zip(runs, own, strict=True)
    summaries = [summarize(run, slo, window) for run, window in each if run.requests]
    figures = (*_percentiles(_together(0, bare).cohort), *_rates(summaries))
    return msgspec.structs.replace(bare, figures=figures)


def _percentiles(cohort: Cohort) -> list[Figure]:
    named = (
        ("TTFT", cohort.ttft_from_intended),
        ("ITL", cohort.itl),
        ("TPOT", cohort.tpot),
        ("E2E", cohort.e2e_from_intended),
    )
    return [
        Figure(Measure(name=f"{level} {name}", unit=Unit.SECONDS, better=Better.LOWER), Interval(value))
        for name, found in named
        if found is not None
        for level, value in (("p50", found.p50), ("p99", found.p99))
    ]


def _rates(summaries: Sequence[Summary]) -> list[Figure]:
    rates = [summary.rates for summary in summaries]
    named = (
        ("requests completed", Unit.REQUESTS_PER_S, [rate.requests_per_s for rate in rates]),
        ("output tokens", Unit.TOKENS_PER_S, [rate.output_tokens_per_s for rate in rates]),
        ("goodput", Unit.REQUESTS_PER_S, [r.goodput_per_s for r in rates if r.goodput_per_s is not None]),
    )
    return [
        Figure(Measure(name=name, unit=unit, better=Better.HIGHER), Interval(statistics.fmean(values)))
        for name, unit, values in named
        if values
    ]
