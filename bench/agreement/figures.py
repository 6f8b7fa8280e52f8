"""One run by two load generators, and what the server noted itself: percentiles beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from twinpool.bench.scripted_server import Sent
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.metrics import e2e_s, itls_s, tpot_s, ttft_s
from twinpool.bench.serving.record import Ending, RequestRecord, Run

PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Settings:
    """What both generators send: `num_requests` at even gaps."""

    num_requests: int
    rate_per_s: float
    input_tokens: int
    output_tokens: int
    tokenizer_dir: Path
    seed: int = 1


class Metric(StrEnum):
    """What is compared. Seconds of requests that completed."""

    TTFT = "TTFT"
    ITL = "ITL"
    """Each gap."""
    TPOT = "TPOT"
    """Each request's mean gap."""
    TPOT_BY_GAPS = "TPOT by gaps"
    """Each request's mean gap, as often as it has gaps."""
    E2E = "E2E"


Figures = Mapping[Metric, Mapping[int, float]]
"""Milliseconds by metric and percent."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, in milliseconds."""

    metric: Metric
    percent: int
    ours_ms: float
    theirs_ms: float
    servers_ms: float | None
    """What the server noted in our run."""

    @property
    def difference(self) -> float:
        """Ours over theirs, less 1."""
        return self.ours_ms / self.theirs_ms - 1

    def __str__(self) -> str:
        servers = "" if self.servers_ms is None else f"{self.servers_ms:>12.2f}"
        return (
            f"{self.metric:<14}{f'p{self.percent}':>5}{self.ours_ms:>12.2f}{self.theirs_ms:>12.2f}"
            f"{self.difference:>11.2%}{servers}"
        )


def header(their_name: str) -> str:
    """What stands above the rows."""
    return f"{'ms':<14}{'':>5}{'twinpool':>12}{their_name:>12}{'difference':>11}{'server':>12}"


def compared(run: Run, theirs: Figures, log: Sequence[Sent] | None) -> list[Row]:
    """The figures of our run beside `theirs`, as many as they have, and beside what the server noted in ours."""
    completed = [record for record in run.requests if record.ending is Ending.COMPLETED]
    rows = []
    for metric, percents in theirs.items():
        ours_s = _clients_s(metric, completed)
        servers_s = None if log is None else _servers_s(metric, log)
        for percent, theirs_ms in percents.items():
            servers_ms = None if servers_s is None else percentile(servers_s, percent) * 1e3
            rows.append(Row(metric, percent, percentile(ours_s, percent) * 1e3, theirs_ms, servers_ms))
    return rows


def _clients_s(metric: Metric, records: Sequence[RequestRecord]) -> list[float]:
    found: list[float | None]
    match metric:
        case Metric.TTFT:
            found = [ttft_s(record) for record in records]
        case Metric.ITL:
            found = [float(gap) for record in records for gap in itls_s(record)]
        case Metric.TPOT:
            found = [tpot_s(record) for record in records]
        case Metric.TPOT_BY_GAPS:
            found = [tpot_s(record) for record in records for _ in range(record.output_tokens - 1)]
        case Metric.E2E:
            found = [e2e_s(record) for record in records]
    return [seconds for seconds in found if seconds is not None]


def _servers_s(metric: Metric, log: Sequence[Sent]) -> list[float]:
    match metric:
        case Metric.TTFT:
            return [sent.pieces_at[0] - sent.received_at for sent in log]
        case Metric.ITL:
            return [
                after - before
                for sent in log
                for before, after in zip(sent.pieces_at, sent.pieces_at[1:], strict=False)
            ]
        case Metric.TPOT:
            return [_mean_gap_s(sent) for sent in log if len(sent.pieces_at) > 1]
        case Metric.TPOT_BY_GAPS:
            return [_mean_gap_s(sent) for sent in log for _ in sent.pieces_at[1:]]
        case Metric.E2E:
            return [sent.pieces_at[-1] - sent.received_at for sent in log]


def _mean_gap_s(sent: Sent) -> float:
    return (sent.pieces_at[-1] - sent.pieces_at[0]) / (len(sent.pieces_at) - 1)
