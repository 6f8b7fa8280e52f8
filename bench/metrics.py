"""What is computed from outcomes. The definitions are those of `DESIGN.md`, "Vocabulary"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from twinpool.bench.client import End, Outcome


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def ttft_s(outcome: Outcome) -> float | None:
    """First non-empty output − request sent, on the client's clock; None without output."""
    return None if outcome.first_output_at is None else outcome.first_output_at - outcome.sent_at


def itls_s(outcome: Outcome) -> list[float]:
    """Each gap between consecutive output tokens."""
    return [later - earlier for earlier, later in pairwise(outcome.token_at)]


def tpot_s(outcome: Outcome) -> float | None:
    """(E2E − TTFT) / (output tokens − 1), up to the last token; None with fewer than two."""
    if len(outcome.token_at) < 2 or outcome.first_output_at is None:
        return None
    return (outcome.token_at[-1] - outcome.first_output_at) / (len(outcome.token_at) - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """What every request should keep: a bound on its TTFT, and on the 99th percentile of its own ITLs."""

    ttft_s: float
    itl_p99_s: float

    def is_met(self, outcome: Outcome) -> bool:
        """Whether the request succeeded within all bounds. Refused, failed and left ones never do."""
        first_s, gaps_s = ttft_s(outcome), itls_s(outcome)
        return (
            outcome.end is End.COMPLETE
            and first_s is not None
            and first_s <= self.ttft_s
            and (not gaps_s or percentile(gaps_s, 99) <= self.itl_p99_s)
        )


def goodput_per_s(outcomes: Iterable[Outcome], slo: Slo, seconds: float) -> float:
    """Requests per second that succeeded and met the SLO."""
    return sum(slo.is_met(outcome) for outcome in outcomes) / seconds


def slo_of(outcomes: Sequence[Outcome], factor: float) -> Slo:
    """`factor` times what 99 % of these undisturbed requests kept."""
    complete = [outcome for outcome in outcomes if outcome.end is End.COMPLETE]
    first = [seconds for outcome in complete if (seconds := ttft_s(outcome)) is not None]
    gaps = [percentile(gaps, 99) for outcome in complete if (gaps := itls_s(outcome))]
    return Slo(factor * percentile(first, 99), factor * percentile(gaps, 99))


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
