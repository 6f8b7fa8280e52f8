"""What the server says of each request: a Twinpool's stages should sum to the TTFT that its client saw."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import msgspec

from twinpool.bench.client import Client
from twinpool.bench.serving.metrics import unexplained_s
from twinpool.bench.serving.record import RequestRecord, Run, ServerTimeline, Stage
from twinpool.bench.serving.settings import LoadSettings
from twinpool.bench.serving.summary import EXPLAINED_WITHIN_S

_AT_ONCE = 8
_LIMIT_S = 120.0
_STAGES = ("validate", "tokenize", "queue", "prefill", "deliver")
"""Up to the first token at the client, in order."""
_BESIDE = {"transfer": "transferring", "decode": "decoding", "resume": "prefilling"}
"""While tokens are delivered, and the state whose last entry each began with."""


class _Attempt(msgspec.Struct):
    prefill_worker: str
    decode_worker: str


class _State(msgspec.Struct):
    state: str
    at_s: float


class _Prefill(msgspec.Struct):
    num_cached_tokens: int
    queue_s: float = 0.0
    compute_s: float = 0.0


class _Timeline(msgspec.Struct):
    """The answer of `GET /v1/requests/{id}/timeline`."""

    ttft_s: float | None
    e2e_s: float | None
    stages_s: dict[str, float]
    attempts: list[_Attempt]
    states: list[_State]
    prefill: _Prefill | None = None


def read_timeline(data: bytes) -> ServerTimeline:
    """A server's answer as a value. Raises msgspec.MsgspecError if it is none."""
    timeline = msgspec.json.decode(data, type=_Timeline)
    last = timeline.attempts[-1] if timeline.attempts else None
    where = {} if last is None else _places(last)
    taken = [(name, timeline.stages_s[name]) for name in _STAGES if name in timeline.stages_s]
    starts = [0.0, *accumulate(seconds for _, seconds in taken)]
    entered = {state.state: state.at_s for state in timeline.states}
    return ServerTimeline(
        ttft_s=timeline.ttft_s,
        e2e_s=timeline.e2e_s,
        stages=tuple(
            Stage(name, start, seconds, where.get(name, ""))
            for (name, seconds), start in zip(taken, starts, strict=False)
        ),
        beside=tuple(
            Stage(name, entered.get(state, 0.0), timeline.stages_s[name], where.get(name, ""))
            for name, state in _BESIDE.items()
            if name in timeline.stages_s
        ),
        num_attempts=len(timeline.attempts),
        workers=() if last is None else tuple(dict.fromkeys((last.prefill_worker, last.decode_worker))),
        cached_tokens=None if timeline.prefill is None else timeline.prefill.num_cached_tokens,
        prefill_s=None if timeline.prefill is None else timeline.prefill.queue_s + timeline.prefill.compute_s,
    )


def _places(attempt: _Attempt) -> Mapping[str, str]:
    return {
        "prefill": attempt.prefill_worker,
        "transfer": attempt.decode_worker,
        "decode": attempt.decode_worker,
    }


def joined(run: Run, settings: LoadSettings) -> Run:
    """The run with the timelines that its server still has. It is asked only after the load, so as not to add to it."""
    timelines = asyncio.run(
        _fetched(run, Client(settings.base_url, settings.api_key, verify_tls=settings.verify_tls))
    )
    requests = tuple(with_timeline(record, timelines.get(record.index)) for record in run.requests)
    return msgspec.structs.replace(run, requests=requests)


def with_timeline(record: RequestRecord, timeline: ServerTimeline | None) -> RequestRecord:
    """The record with its timeline, which says too what was found in the prefix cache, if the usage did not."""
    cached = record.cached_tokens
    # An attempt that resumes finds what the one before has made as well: of the prompt all, at most.
    if cached is None and timeline is not None and timeline.cached_tokens is not None:
        cached = min(timeline.cached_tokens, record.input_tokens)
    return msgspec.structs.replace(record, timeline=timeline, cached_tokens=cached)


async def _fetched(run: Run, client: Client) -> dict[int, ServerTimeline]:
    slots = asyncio.Semaphore(_AT_ONCE)
    found: dict[int, ServerTimeline] = {}

    async def fetch(record: RequestRecord) -> None:
        async with slots:
            try:
                answer = await client.get(f"/v1/requests/{record.request_id}/timeline")
                if answer.status == 200:
                    found[record.index] = read_timeline(answer.body)
            except (OSError, TimeoutError, msgspec.MsgspecError):
                return  # it counts as missing

    async def fetch_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for record in run.requests:
                if record.status:
                    tasks.create_task(fetch(record))

    try:
        async with asyncio.timeout(_LIMIT_S):
            await fetch_all()
    except TimeoutError:
        pass
    return found


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well server and clients agree on the TTFT. Gaps are client's − server's, in seconds."""

    num_joined: int
    num_missing: int
    """Requests with output whose timeline the server did not have any more."""
    num_within: int
    """Of those joined, within 2 ms."""
    median_gap_s: float
    largest_gap_s: float
    """The one furthest from 0."""
    largest_request_id: str

    @property
    def is_partial(self) -> bool:
        """Whether of some request with output this is not known, or they do not agree."""
        return self.num_within < self.num_joined + self.num_missing

    def words(self) -> str:
        """In one line."""
        missing = f"; the server had no timeline of {self.num_missing}" if self.num_missing else ""
        if not self.num_joined:
            return f"no request was joined with its timeline{missing}"
        gaps = f"median {self.median_gap_s * 1e3:.2f} ms, furthest {self.largest_gap_s * 1e3:.2f} ms"
        where = f" ({self.largest_request_id})" if self.num_within < self.num_joined else ""
        return (
            f"stages sum to the client's TTFT within 2 ms for {self.num_within} of {self.num_joined} requests: "
            f"{gaps}{where}{missing}"
        )


def agreement(run: Run) -> Agreement | None:
    """Of all requests of a run; None if it has no timelines at all."""
    if all(record.timeline is None for record in run.requests):
        return None
    gaps = [(gap, record.request_id) for record in run.requests if (gap := unexplained_s(record)) is not None]
    largest = max(gaps, key=lambda gap: abs(gap[0]), default=(0.0, ""))
    return Agreement(
        num_joined=len(gaps),
        num_missing=sum(record.timeline is None and bool(record.chunks) for record in run.requests),
        num_within=sum(abs(gap) <= EXPLAINED_WITHIN_S for gap, _ in gaps),
        median_gap_s=median(gap for gap, _ in gaps) if gaps else 0.0,
        largest_gap_s=largest[0],
        largest_request_id=largest[1],
    )
