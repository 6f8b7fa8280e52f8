"""Requests that have ended and are to be recorded, until all that belongs to them has come."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from twinpool.coordinator.lifecycle import TABLE, Request
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.service import Submission
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import InvariantViolation, RequestError
from twinpool.request import RequestState

SETTLE_S = 1.0
"""After a request's end its first output may still be handed over, a stop string be found in its last ones, and a
worker's report come."""


class _Settling(NamedTuple):
    ended_at: float
    request: Request
    error: RequestError | None


class EndedRequests:
    """What the record wants of the lifecycle: requests go in when their outcome is decided, and what became of them
    comes out a moment later, or soon if they were refused. If no record `is_wanted`, it keeps nothing.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._settling: deque[_Settling] = deque()
        self._refused: list[EndedRequest] = []

    def add(self, request: Request, error: RequestError | None, now: float) -> None:
        """The outcome of an admitted request is decided."""
        if self._is_wanted:
            self._settling.append(_Settling(now, request, error))

    def refuse(self, submission: Submission, error: RequestError, now: float) -> None:
        """A request was not admitted."""
        if self._is_wanted:
            self._refused.append(
                EndedRequest(
                    request_id=submission.request_id,
                    tenant=_name(submission.tenant),
                    received_at=submission.received_at,
                    outcome=RequestState.REJECTED,
                    error_code=_code(error),
                    prompt_token_ids=submission.prompt_token_ids,
                    cache_salt=submission.cache_salt,
                    max_tokens=submission.sampling.max_tokens,
                    num_choices=submission.num_choices,
                    e2e_s=now - submission.received_at,
                )
            )

    def refuse_unheard(self, request_id: str, tenant: Tenant, error: RequestError, now: float) -> None:
        """A request was turned away before its prompt was tokenized."""
        if self._is_wanted:
            self._refused.append(
                EndedRequest(
                    request_id=request_id,
                    tenant=_name(tenant),
                    received_at=now,
                    outcome=RequestState.REJECTED,
                    error_code=_code(error),
                )
            )

    def due(self, now: float, block_size: int, settle_s: float = SETTLE_S) -> list[EndedRequest]:
        """What became of those that ended `settle_s` ago or earlier; nothing of them stays. KV blocks have `block_size`
        tokens."""
        found, self._refused = self._refused, []
        while self._settling and now - self._settling[0].ended_at >= settle_s:
            found.append(_ended(self._settling.popleft(), now, block_size))
        return found


def _ended(settling: _Settling, now: float, block_size: int) -> EndedRequest:
    request, timeline = settling.request, settling.request.timeline
    submission = request.submission
    if request.ending is None:
        raise InvariantViolation(
            f"ended without an outcome: {request.story()}", request_id=request.request_id
        )
    return EndedRequest(
        request_id=request.request_id,
        tenant=_name(submission.tenant),
        received_at=timeline.received_at,
        outcome=TABLE[RequestState.DRAINING].moves[request.ending],
        finish=timeline.finish,
        error_code="" if settling.error is None else _code(settling.error),
        prompt_token_ids=submission.prompt_token_ids,
        cache_salt=submission.cache_salt,
        max_tokens=submission.sampling.max_tokens,
        num_output_tokens=timeline.num_output_tokens,
        num_choices=submission.num_choices,
        ttft_s=None if timeline.ttft_us is None else timeline.ttft_us / 1e6,
        e2e_s=timeline.e2e_us(now) / 1e6,
        facts=timeline.facts(now, block_size),
    )


def _code(error: RequestError) -> str:
    return error.code or error.kind


def _name(tenant: Tenant) -> str:
    return "" if tenant is ANYONE else tenant.name
