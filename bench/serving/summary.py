"""What is said of a run: which of its requests are measured, how they ended, their distributions and rates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec
import numpy as np

from twinpool.bench.serving.distributions import Distribution, Values, distribution
from twinpool.bench.serving.metrics import (
    RequestMetrics,
    num_chunk_tokens,
    num_shared_tokens,
    request_metrics,
    unexplained_s,
    wait_before_send_s,
)
from twinpool.bench.serving.record import Ending, RequestRecord, Run
from twinpool.bench.serving.slo import Slo
from twinpool.config import require
from twinpool.errors import ConfigError

INPUT_EDGES = (0, 128, 512, 2048, 8192, 32_768)
OUTPUT_EDGES = (0, 32, 128, 512, 2048)
"""Tokens at which the buckets of lengths begin."""
EXPLAINED_WITHIN_S = 0.002
"""The server's stages account for a client's TTFT if they sum to it within this."""


_Number = TypeVar("_Number", int, float)


class WindowKind(StrEnum):
    """Which requests a window takes in, and what its rates count."""

    CLOSED_COHORT = "closed_cohort"
    """The requests intended from `from_s` on, each followed to its end; rates are theirs over the time until the last
    of them has ended. Filling and emptying the server count."""
    STEADY_STATE = "steady_state"
    """Endings and distributions are those of the requests intended within the window, each followed to its end, be it
    after the window. Rates are of the requests that *ended* within it, whenever they were intended: what the server got
    done in that time, not what was asked of it."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """[from_s, to_s) of a run's time."""

    kind: WindowKind
    from_s: float
    to_s: float

    @property
    def duration_s(self) -> float:
        """What rates are divided by."""
        return self.to_s - self.from_s

    def measured(self, requests: Iterable[RequestRecord]) -> list[RequestRecord]:
        """The requests whose endings and distributions are told."""
        return [
            record
            for record in requests
            if record.intended_at_s >= self.from_s
            and (self.kind is WindowKind.CLOSED_COHORT or record.intended_at_s < self.to_s)
        ]

    def done(self, requests: Iterable[RequestRecord]) -> list[RequestRecord]:
        """The requests that rates count."""
        if self.kind is WindowKind.CLOSED_COHORT:
            return self.measured(requests)
        return [record for record in requests if self.from_s <= record.ended_at_s < self.to_s]


def closed_cohort(run: Run, warm_up_s: float = 0.0) -> Window:
    """All requests, but those intended within the warm-up. Raises ConfigError if that leaves no time."""
    return _window(WindowKind.CLOSED_COHORT, warm_up_s, run.duration_s)


def steady_state(run: Run, warm_up_s: float) -> Window:
    """From the warm-up's end to the last arrival: from then on the load only falls. Raises ConfigError if that leaves
    no time."""
    last_s = max((record.intended_at_s for record in run.requests), default=0.0)
    allowed = "closed_cohort, as all requests were to arrive at once"
    require("--window", WindowKind.STEADY_STATE.value, last_s > 0, allowed)
    return _window(WindowKind.STEADY_STATE, warm_up_s, last_s)


def window_of(run: Run, kind: WindowKind, warm_up_s: float) -> tuple[Window, str]:
    """The window of that kind; or, if the load was over too early for it, that of all requests, and why."""
    choose = steady_state if kind is WindowKind.STEADY_STATE else closed_cohort
    try:
        window = choose(run, warm_up_s)
    except ConfigError as exc:
        return closed_cohort(run), str(exc)
    if window.measured(run.requests):
        return window, ""
    return closed_cohort(run), f"no request came after --warm-up, {warm_up_s:g} s"


def _window(kind: WindowKind, from_s: float, to_s: float) -> Window:
    require("--warm-up", from_s, 0 <= from_s < to_s, f"0 or more, and less than the load's {to_s:.3g} s")
    return Window(kind=kind, from_s=from_s, to_s=to_s)


class Cohort(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of some requests. Distributions, in seconds or tokens/s, are of completed requests; None of none."""

    num_requests: int
    endings: dict[str, int]
    """How many ended each way, by `Ending`; every way is there."""
    num_good: int | None
    """Completed within every SLO; None without an SLO."""
    input_tokens: int
    output_tokens: int
    """Of completed requests, both."""
    cached_tokens: int | None
    """Prompt tokens of completed requests that were found in a prefix cache; None if the server says so of none."""
    looked_up_tokens: int
    """All prompt tokens of the completed requests of which it says that."""
    num_shared_tokens: int
    """Output tokens that came in a chunk with others."""
    num_miscounted: int
    """Completed requests whose chunks hold another number of tokens than the server says."""
    token_counts: dict[str, int]
    """How many completed requests' tokens were counted each way, by `TokenCount`."""
    ttft: Distribution | None
    ttft_from_intended: Distribution | None
    itl: Distribution | None
    """All gaps of all requests together."""
    itl_p99: Distribution | None
    """The p99 of each request's own gaps."""
    chunk_gap: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    e2e_from_intended: Distribution | None
    decode_rate: Distribution | None
    request_rate: Distribution | None
    wait_before_send: Distribution | None
    """Of all requests, those too that never reached the server."""
    stages: dict[str, Distribution]
    """The server's, by name, of completed requests that have a timeline."""
    unexplained: Distribution | None
    """The client's TTFT − the sum of the server's stages."""
    num_unexplained: int
    """Requests of which that is more than `EXPLAINED_WITHIN_S`, either way."""

    @property
    def failure_share(self) -> float:
        """The share that did not complete: rejected, failed, timed out and cancelled ones. 0 of none."""
        completed = self.endings[Ending.COMPLETED]
        return (self.num_requests - completed) / self.num_requests if self.num_requests else 0.0

    @property
    def good_share(self) -> float | None:
        """The share that met the SLO, of all; None without an SLO or requests."""
        return None if self.num_good is None or not self.num_requests else self.num_good / self.num_requests


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second: completed requests, those of them that met the SLO (goodput; None without one), and the tokens of
    completed requests."""

    requests_per_s: float
    goodput_per_s: float | None
    input_tokens_per_s: float
    output_tokens_per_s: float

    def per(self, num_accelerators: int) -> Rates:
        """The same for each of so many."""
        return Rates(
            requests_per_s=self.requests_per_s / num_accelerators,
            goodput_per_s=None if self.goodput_per_s is None else self.goodput_per_s / num_accelerators,
            input_tokens_per_s=self.input_tokens_per_s / num_accelerators,
            output_tokens_per_s=self.output_tokens_per_s / num_accelerators,
        )


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of at least so many tokens and below so many (None: any number)."""

    at_least: int
    below: int | None
    cohort: Cohort


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All that is said of a run."""

    window: Window
    was_interrupted: bool
    slo: Slo | None
    cohort: Cohort
    rates: Rates
    accelerators: dict[str, int]
    """How many each pool has, by its name; empty if nobody said."""
    rates_per_accelerator: dict[str, Rates]
    """By pool: `rates` over its accelerators; "total": over those of all pools."""
    by_input_length: tuple[Bucket, ...]
    by_output_length: tuple[Bucket, ...]
    """By the output tokens that came, or were asked for if the request did not complete."""
    by_group: dict[str, Cohort]
    """By `RequestRecord.group`, where it is not empty."""


def summarize(
    run: Run,
    slo: Slo | None = None,
    window: Window | None = None,
    *,
    accelerators: Mapping[str, int] | None = None,
    input_edges: Sequence[int] = INPUT_EDGES,
    output_edges: Sequence[int] = OUTPUT_EDGES,
) -> Summary:
    """Computes everything. Without a window it is the closed cohort of all requests.

    `accelerators` is how many each pool has, each 1 or more, by a name other than "total". Raises ConfigError.
    """
    window = window or closed_cohort(run)
    accelerators = dict(accelerators or {})
    for pool, count in accelerators.items():
        require(f"the number of accelerators of {pool!r}", count, count >= 1 and pool != "total", "1 or more")
    measured = [request_metrics(record) for record in window.measured(run.requests)]
    rates = rates_of(
        [request_metrics(record) for record in window.done(run.requests)], slo, window.duration_s
    )
    counts = accelerators | {"total": sum(accelerators.values())} if accelerators else {}
    groups = sorted({request.record.group for request in measured} - {""})
    return Summary(
        window=window,
        was_interrupted=run.was_interrupted,
        slo=slo,
        cohort=cohort_of(measured, slo),
        rates=rates,
        accelerators=accelerators,
        rates_per_accelerator={pool: rates.per(count) for pool, count in counts.items()},
        by_input_length=_buckets(measured, lambda record: record.input_tokens, input_edges, slo),
        by_output_length=_buckets(measured, _output_length, output_edges, slo),
        by_group={
            group: cohort_of([r for r in measured if r.record.group == group], slo) for group in groups
        },
    )


def rates_of(requests: Sequence[RequestMetrics], slo: Slo | None, duration_s: float) -> Rates:
    """The rates of those of these requests that completed, in so many seconds."""
    completed = [request for request in requests if request.is_completed]
    return Rates(
        requests_per_s=len(completed) / duration_s,
        goodput_per_s=None if slo is None else sum(map(slo.is_met, completed)) / duration_s,
        input_tokens_per_s=sum(request.record.input_tokens for request in completed) / duration_s,
        output_tokens_per_s=sum(request.record.output_tokens for request in completed) / duration_s,
    )


def cohort_of(requests: Sequence[RequestMetrics], slo: Slo | None = None) -> Cohort:
    """What is said of these requests."""
    completed = [request for request in requests if request.is_completed]
    records = [request.record for request in completed]
    endings = Counter(request.record.ending for request in requests)
    unexplained = _known(map(unexplained_s, records))
    return Cohort(
        num_requests=len(requests),
        endings={ending.value: endings[ending] for ending in Ending},
        num_good=None if slo is None else sum(map(slo.is_met, completed)),
        input_tokens=sum(record.input_tokens for record in records),
        output_tokens=sum(record.output_tokens for record in records),
        cached_tokens=sum(cached) if (cached := _known(record.cached_tokens for record in records)) else None,
        looked_up_tokens=sum(record.input_tokens for record in records if record.cached_tokens is not None),
        num_shared_tokens=sum(map(num_shared_tokens, records)),
        num_miscounted=sum(num_chunk_tokens(record) != record.output_tokens for record in records),
        token_counts=dict(sorted(Counter(record.token_count.value for record in records).items())),
        ttft=_distribution(request.ttft_s for request in completed),
        ttft_from_intended=_distribution(request.ttft_from_intended_s for request in completed),
        itl=_pooled(request.itls_s for request in completed),
        itl_p99=_distribution(request.itl_p99_s for request in completed),
        chunk_gap=_pooled(request.chunk_gaps_s for request in completed),
        tpot=_distribution(request.tpot_s for request in completed),
        e2e=_distribution(request.e2e_s for request in completed),
        e2e_from_intended=_distribution(request.e2e_from_intended_s for request in completed),
        decode_rate=_distribution(request.decode_rate_per_s for request in completed),
        request_rate=_distribution(request.request_rate_per_s for request in completed),
        wait_before_send=_distribution(wait_before_send_s(request.record) for request in requests),
        stages=_stages(records),
        unexplained=distribution(unexplained),
        num_unexplained=sum(abs(seconds) > EXPLAINED_WITHIN_S for seconds in unexplained),
    )


def _known(values: Iterable[_Number | None]) -> list[_Number]:
    return [value for value in values if value is not None]


def _distribution(values: Iterable[float | None]) -> Distribution | None:
    return distribution(_known(values))


def _pooled(gaps_s: Iterable[Values]) -> Distribution | None:
    return distribution(np.concatenate([np.empty(0), *gaps_s]))


def _stages(records: Iterable[RequestRecord]) -> dict[str, Distribution]:
    """Each request counts once per name: a stage that was gone through twice counts as their sum."""
    seconds: dict[str, list[float]] = {}
    for record in records:
        if record.timeline is not None:
            own: defaultdict[str, float] = defaultdict(float)
            for stage in record.timeline.stages:
                own[stage.name] += stage.duration_s
            for name, spent in own.items():
                seconds.setdefault(name, []).append(spent)
    return {name: found for name, values in seconds.items() if (found := distribution(values))}


def _output_length(record: RequestRecord) -> int:
    return record.output_tokens if record.ending is Ending.COMPLETED else record.wanted_output_tokens


def _buckets(
    requests: Sequence[RequestMetrics],
    length_of: Callable[[RequestRecord], int],
    edges: Sequence[int],
    slo: Slo | None,
) -> tuple[Bucket, ...]:
    """Those that hold a request, the shortest first. The first takes in what is shorter than its edge too."""
    found = []
    for at_least, below in zip(edges, (*edges[1:], None), strict=True):
        within = [
            request
            for request in requests
            if (at_least == edges[0] or length_of(request.record) >= at_least)
            and (below is None or length_of(request.record) < below)
        ]
        if within:
            found.append(Bucket(at_least=at_least, below=below, cohort=cohort_of(within, slo)))
    return tuple(found)
