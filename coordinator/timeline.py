"""The story of one request: when it entered each state, where each attempt ran and why, and what moved.

Stages are the differences of neighbouring stamps in whole microseconds, so those up to the first token add up
to the TTFT exactly, and those up to the end to the time until the last output was ready. All stamps are the
coordinator clock's; durations that a worker measured on its own clock are reported beside them, never mixed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from twinpool.coordinator.service import RequestFacts
from twinpool.messages import HandoffReport, PrefillReport
from twinpool.request import FinishReason, RequestState

_STAGE_BEFORE_FIRST_TOKEN = {
    RequestState.RECEIVED: "validate",
    RequestState.VALIDATED: "tokenize",
    RequestState.TOKENIZED: "queue",
    RequestState.QUEUED: "queue",
    RequestState.PREFILLING: "prefill",
}
_STAGE_AFTER_FIRST_TOKEN = {
    RequestState.QUEUED: "resume",
    RequestState.PREFILLING: "resume",
    RequestState.TRANSFERRING: "transfer",
    RequestState.DECODING: "decode",
}


class CostUnit(StrEnum):
    """What a candidate's cost counts."""

    PROMPT_TOKENS = "prompt tokens"
    """Of a prefill or colocated worker: to compute there until the request's first token."""
    SHARE = "share of the worker"
    """Of a decode worker: how full it would be, 1 for wholly, less a bonus for what it holds of the prompt."""


class Candidate(msgspec.Struct, frozen=True):
    """One worker that the router looked at: its predicted cost (lower wins) and the prompt tokens it should hold.

    The router knows caches by what it sent where, in whole chunks of 64 tokens. What the worker then found in its own
    blocks (`PrefillReport.num_cached`) can be more, or less if it has had to forget.
    """

    worker_id: str
    cost: float
    unit: CostUnit
    num_matched_tokens: int


class Way(StrEnum):
    """How an attempt can be run where a worker is a hybrid."""

    SPLIT = "split"
    LOCAL_PREFILL = "local_prefill"
    """Whole on a decode worker, which computes the prompt too."""
    LOCAL_DECODE = "local_decode"
    """Whole on a prefill worker, which generates too."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long one way to run an attempt should take: until its first token, and from there to its last."""

    way: Way
    prefill_worker: str
    decode_worker: str
    first_token_s: float
    rest_s: float

    @property
    def total_s(self) -> float:
        """Seconds until the last token."""
        return self.first_token_s + self.rest_s


class Exclusion(StrEnum):
    """Why a hybrid did not get a request whole."""

    NO_ROOM = "no room for the request, or too much waits there"
    UNKNOWN_PACE = "how long its steps take is not known yet"
    UNKNOWN_SPLIT = "how long the split way takes is not known yet"
    BUDGET = "its ITL budget leaves no room for chunks of prompts"
    LITTLE_GAIN = "not clearly sooner"
    BUSIER = "has no less of that work to do than the worker that it would help"


@dataclass(frozen=True, slots=True)
class Excluded:
    """A hybrid that could not run the request whole, or should not."""

    way: Way
    worker_id: str
    reason: Exclusion


class Attempt(msgspec.Struct):
    """One attempt: where it was sent, what the router saw, and what the workers reported.

    Where a worker is a hybrid, `predictions` are of the ways that were compared, the one of the `way` taken first, and
    `first_token_s` is what that came to, from `started_at`; `excluded` says which hybrids were not compared, and why.
    """

    number: int
    prefill_worker: str
    decode_worker: str
    candidates: tuple[Candidate, ...]
    started_at: float = 0.0
    way: Way | None = None
    predictions: tuple[Prediction, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    first_token_s: float | None = None
    grant_wait_s: float | None = None
    prefill: PrefillReport | None = None
    handoff: HandoffReport | None = None
    ended: str = ""

    def to_json(self) -> dict[str, Any]:
        """The attempt as JSON values."""
        return {
            "attempt": self.number,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "route": [
                {
                    "worker": c.worker_id,
                    "cost": round(c.cost, 4),
                    "cost_unit": c.unit.value,
                    "num_matched_tokens": c.num_matched_tokens,
                }
                for c in self.candidates
            ],
            "hybrid": None if self.way is None else self._choice_json(self.way),
            "grant_wait_s": self.grant_wait_s,
            "prefill": None if self.prefill is None else _prefill_json(self.prefill),
            "transfer": None if self.handoff is None else _transfer_json(self.handoff),
            "ended": self.ended,
        }

    def _choice_json(self, way: Way) -> dict[str, Any]:
        return {
            "way": way.value,
            "first_token_s": None if self.first_token_s is None else _us(self.first_token_s) / 1e6,
            "predicted": [
                {
                    "way": p.way.value,
                    "prefill_worker": p.prefill_worker,
                    "decode_worker": p.decode_worker,
                    "first_token_s": _us(p.first_token_s) / 1e6,
                    "total_s": _us(p.total_s) / 1e6,
                }
                for p in self.predictions
            ],
            "excluded": [
                {"way": e.way.value, "worker": e.worker_id, "reason": e.reason.value} for e in self.excluded
            ],
        }


class Timeline(msgspec.Struct):
    """Stamps and attempts of one request of a tenant, live or finished.

    `stamps` holds each state with the moment it was entered; `ended_at` is when the client's last output was
    ready (workers may need a moment longer to let go). `first_token_at` is when the first token reached the
    coordinator, `delivered_at` when the first output went to the connection: of an answer that is not streamed,
    the whole answer.
    """

    request_id: str
    num_prompt_tokens: int
    tenant: str = ""
    stamps: list[tuple[RequestState, float]] = []
    attempts: list[Attempt] = []
    num_output_tokens: int = 0
    first_token_at: float | None = None
    delivered_at: float | None = None
    ended_at: float | None = None
    finish: FinishReason | None = None
    error: str = ""

    @property
    def state(self) -> RequestState:
        """The state entered last."""
        return self.stamps[-1][0]

    @property
    def received_at(self) -> float:
        """When the request came in."""
        return self.stamps[0][1]

    def stages_us(self, now: float) -> dict[str, int]:
        """Microseconds per stage so far, in order; a state that is not left yet counts until `now`.

        validate + tokenize + queue + prefill + deliver = TTFT; all but deliver (which runs beside what
        follows it) = the time until `ended_at`. A request that was started again before its first token has all its
        waits in `queue` and all its prefills in `prefill`; after the first token they are `resume`.
        """
        stages: dict[str, int] = {}
        end = _us(now if self.ended_at is None else self.ended_at)
        first = None if self.first_token_at is None else _us(self.first_token_at)
        entered_us = [_us(at) for _, at in self.stamps]
        left_us = [*(min(us, end) for us in entered_us[1:]), end]
        for (state, _), entered, left in zip(self.stamps, entered_us, left_us, strict=True):
            is_before_first = first is None or entered < first
            table = _STAGE_BEFORE_FIRST_TOKEN if is_before_first else _STAGE_AFTER_FIRST_TOKEN
            if left >= entered and (name := table.get(state)) is not None:
                stages[name] = stages.get(name, 0) + left - entered
        if first is not None and self.delivered_at is not None:
            stages["deliver"] = _us(self.delivered_at) - first
        return stages

    @property
    def ttft_us(self) -> int | None:
        """Received to the first output's hand-over to the connection, in microseconds."""
        return self._us_after_received(self.delivered_at)

    @property
    def first_token_us(self) -> int | None:
        """Received to the first token at the coordinator, in microseconds: TTFT without `deliver`."""
        return self._us_after_received(self.first_token_at)

    def e2e_us(self, now: float) -> int:
        """Received to the last output's being ready, in microseconds; until `now` if it is not ended. It is never less
        than the TTFT: an answer that is handed over whole has both when that is done."""
        end = _us(now if self.ended_at is None else self.ended_at)
        return max(end - _us(self.received_at), self.ttft_us or 0)

    def _us_after_received(self, at: float | None) -> int | None:
        return None if at is None else _us(at) - _us(self.received_at)

    def facts(self, now: float, block_size: int) -> RequestFacts:
        """What became of the request until `now`, as its client is told; KV blocks have `block_size` tokens."""
        stages = self.stages_us(now)
        told = [a.prefill for a in self.attempts if a.first_token_s is not None and a.prefill is not None]
        moved = [
            (a.prefill, a.handoff) for a in self.attempts if a.prefill is not None and a.handoff is not None
        ]
        return RequestFacts(
            num_cached_tokens=told[0].num_cached if told else 0,
            num_computed_tokens=told[0].num_computed if told else 0,
            num_transferred_tokens=sum(
                max(0, report.num_cached + report.num_computed - handoff.num_blocks_cached * block_size)
                for report, handoff in moved
            ),
            num_resumed=max(0, len(self.attempts) - 1),
            queue_s=stages.get("queue", 0) / 1e6,
            prefill_s=stages.get("prefill", 0) / 1e6,
            transfer_s=stages.get("transfer", 0) / 1e6,
            decode_s=stages.get("decode", 0) / 1e6,
        )

    def to_json(self, now: float) -> Mapping[str, Any]:
        """The timeline as JSON values; seconds are whole microseconds.

        `first_token_s` is the prefill pool's doing; `ttft_s` is what the client saw, which for an answer that is not
        streamed is all of it; `e2e_s` is as in `e2e_us`. `prefill` and `transfer` are the last attempt's, `attempts`
        has them all.
        """
        last = self.attempts[-1] if self.attempts else None
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "state": self.state.value,
            "finish_reason": None if self.finish is None else self.finish.value,
            "error": self.error or None,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "first_token_s": _seconds(self.first_token_us),
            "ttft_s": _seconds(self.ttft_us),
            "e2e_s": self.e2e_us(now) / 1e6,
            "stages_s": {name: us / 1e6 for name, us in self.stages_us(now).items()},
            "prefill": None if last is None or last.prefill is None else _prefill_json(last.prefill),
            "transfer": None if last is None or last.handoff is None else _transfer_json(last.handoff),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "states": [
                {"state": s.value, "at_s": (_us(t) - _us(self.received_at)) / 1e6} for s, t in self.stamps
            ],
        }


class FinishedTimelines:
    """The timelines of the last `limit` requests that reached their end; older ones are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        """Keeps `timeline`, in place of an older one of the same request id."""
        self._by_id.pop(timeline.request_id, None)
        self._by_id[timeline.request_id] = timeline
        if len(self._by_id) > self._limit:
            self._by_id.popitem(last=False)

    def get(self, request_id: str) -> Timeline | None:
        """The timeline, or None if it is unknown or forgotten."""
        return self._by_id.get(request_id)

    def __len__(self) -> int:
        return len(self._by_id)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6


def _prefill_json(report: PrefillReport) -> dict[str, Any]:
    return {
        "queue_s": _us(report.queue_s) / 1e6,
        "compute_s": _us(report.compute_s) / 1e6,
        "num_cached_tokens": report.num_cached,
        "num_computed_tokens": report.num_computed,
        "num_steps": report.num_steps,
    }


def _transfer_json(report: HandoffReport) -> dict[str, Any]:
    return {
        "transport": report.transport,
        "num_bytes": report.num_bytes,
        "transfer_s": _us(report.transfer_s) / 1e6,
        "gb_per_s": report.num_bytes / report.transfer_s / 1e9 if report.transfer_s > 0 else None,
        "wait_s": _us(report.wait_s) / 1e6,
        "num_blocks_sent": report.num_blocks_sent,
        "num_blocks_cached": report.num_blocks_cached,
    }
