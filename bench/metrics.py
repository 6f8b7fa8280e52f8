"""What the proof programs compute from outcomes. The definitions are those of `serving/metrics.py`; here is only how an
outcome reads as a record, and what nobody else needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinpool.bench.client import End, Outcome
from twinpool.bench.serving import metrics
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, TokenCount
from twinpool.bench.serving.slo import Slo

_ENDINGS = {
    End.COMPLETE: Ending.COMPLETED, End.FAILED: Ending.FAILED, End.REFUSED: Ending.REJECTED,
    End.LEFT: Ending.CANCELLED, End.BROKEN: Ending.FAILED, End.HUNG: Ending.TIMED_OUT, End.UNREACHABLE: Ending.FAILED,
}  # fmt: skip


def record_of(outcome: Outcome) -> RequestRecord:
    """The outcome as a record. The programs send when they mean to: intended is sent."""
    chunks = [Chunk(at, 1) for at in outcome.token_at]
    if outcome.first_output_at is not None and (not chunks or outcome.first_output_at < chunks[0].at_s):
        chunks.insert(0, Chunk(outcome.first_output_at, 0))  # text before the first token id
    return RequestRecord(
        index=0, request_id=outcome.request_id, group="", intended_at_s=outcome.sent_at, sent_at_s=outcome.sent_at,
        ended_at_s=outcome.ended_at, ending=_ENDINGS[outcome.end], input_tokens=outcome.num_prompt_tokens or 0,
        wanted_output_tokens=len(outcome.token_ids), output_tokens=len(outcome.token_at), chunks=tuple(chunks),
        token_count=TokenCount.IDS, finish_reason=outcome.finish_reason, status=outcome.status, error=outcome.error,
    )  # fmt: skip


def ttft_s(outcome: Outcome) -> float | None:
    """First output − sent; None without output."""
    return metrics.ttft_s(record_of(outcome))


def itls_s(outcome: Outcome) -> list[float]:
    """Each gap between consecutive output tokens."""
    return list(map(float, metrics.itls_s(record_of(outcome))))


def tpot_s(outcome: Outcome) -> float | None:
    """(E2E − TTFT) / (output tokens − 1); None with fewer than two."""
    return metrics.tpot_s(record_of(outcome))


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """Whether the request succeeded within all bounds. Refused, failed and left ones never do."""
    return slo.is_met(metrics.request_metrics(record_of(outcome)))


def goodput_per_s(outcomes: Iterable[Outcome], slo: Slo, seconds: float) -> float:
    """Requests per second that succeeded and met the SLO."""
    return sum(is_good(outcome, slo) for outcome in outcomes) / seconds


def slo_of(outcomes: Sequence[Outcome], factor: float) -> Slo:
    """`factor` times what 99 % of these undisturbed requests kept."""
    complete = [outcome for outcome in outcomes if outcome.end is End.COMPLETE]
    first = [seconds for outcome in complete if (seconds := ttft_s(outcome)) is not None]
    gaps = [percentile(gaps, 99) for outcome in complete if (gaps := itls_s(outcome))]
    return Slo(ttft_s=factor * percentile(first, 99), itl_p99_s=factor * percentile(gaps, 99))


@dataclass(frozen=True, slots=True)
class Summary:
    """The middle and the far end of some durations, in seconds; NaN of none."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float

    def __str__(self) -> str:
        shown = (f"{seconds * 1e3:,.1f}" for seconds in (self.p50_s, self.p99_s, self.max_s))
        return " / ".join(shown) + f" ms (p50 / p99 / max of {self.count})"


def summary(values: Iterable[float | None]) -> Summary:
    """Summarizes the values that exist."""
    seconds = [value for value in values if value is not None]
    return Summary(
        len(seconds), percentile(seconds, 50), percentile(seconds, 99), max(seconds, default=math.nan)
    )


def slope_per_hour(samples: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope of (seconds, value) samples, per hour; 0 with fewer than two moments."""
    if len(samples) < 2:
        return 0.0
    mean_t = sum(t for t, _ in samples) / len(samples)
    mean_v = sum(v for _, v in samples) / len(samples)
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return 3600 * sum((t - mean_t) * (v - mean_v) for t, v in samples) / spread if spread else 0.0
