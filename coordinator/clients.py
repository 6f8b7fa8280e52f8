"""The clients' side of the core: requests that arrive, that are not wanted any more, or that run out of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from twinpool.config import CoordinatorConfig
from twinpool.coordinator.accounts import Accounts
from twinpool.coordinator.admission import Admission
from twinpool.coordinator.custody import Custody
from twinpool.coordinator.events import Command, Refuse
from twinpool.coordinator.lifecycle import Move, Request
from twinpool.coordinator.retries import RetryBudget
from twinpool.coordinator.routing import Router
from twinpool.coordinator.service import Submission
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.tenants import Tenant
from twinpool.coordinator.timeline import Timeline
from twinpool.coordinator.waiting import WaitingQueue
from twinpool.errors import (
    DeadlineExceeded,
    NoWorker,
    RequestCancelled,
    RequestError,
    UnknownRequest,
)
from twinpool.metrics import CoordinatorMetric, Timing
from twinpool.request import FinishReason, RequestState

STOPPING = "the server is stopping and takes no new requests"


class Clients:
    """Admits requests and ends them for reasons that are not the workers'; `emit` takes commands in order."""

    def __init__(
        self,
        config: CoordinatorConfig,
        custody: Custody,
        queue: WaitingQueue,
        admission: Admission,
        accounts: Accounts,
        router: Router,
        retries: RetryBudget,
        tally: Tally,
        emit: Callable[[Command], None],
        prefix_of: Callable[[Submission], Sequence[int]],
    ) -> None:
        self._max_wait_s = config.max_wait_s
        self._custody = custody
        self._queue = queue
        self._admission = admission
        self._accounts = accounts
        self._router = router
        self._retries = retries
        self._tally = tally
        self._emit = emit
        self._prefix_of = prefix_of
        self._deadlines: list[tuple[float, int, str]] = []
        """A heap of deadlines, with the numbers and names of their requests, which may have ended."""
        self.is_draining = False

    def timeline(self, request_id: str) -> Timeline | None:
        """The timeline of a live or recent request."""
        request = self._custody.requests.get(request_id)
        if request is None:
            return self._custody.finished.get(request_id)
        request.catch_up()
        return request.timeline

    def arrived(self, submission: Submission, now: float) -> None:
        """A new request: queued, or refused at once."""
        request = Request(submission, self._accounts.of(submission.tenant, now))
        request.prefix = self._prefix_of(submission)
        request.move(Move.VALIDATE, submission.validated_at)
        request.move(Move.TOKENIZE, submission.tokenized_at)
        if (error := self._refusal(request, now)) is not None:
            request.move(Move.REJECT, now)
            self._custody.ended.refuse(submission, error, now)
            self._refuse(submission.request_id, error)
            return
        num_prompt = len(submission.prompt_token_ids)
        request.account.admit(num_prompt + submission.sampling.max_tokens, now)
        self._retries.earn()
        self._custody.requests[submission.request_id] = request
        self._tally.add(CoordinatorMetric.PROMPT_TOKENS, amount=num_prompt)
        request.move(Move.ADMIT, now)
        request.queued_at = now
        self._queue.append(request)
        if (deadline := submission.deadline) is not None:
            heappush(self._deadlines, (deadline, request.number, request.request_id))

    def completed(self, request_id: str, num_output_tokens: int, now: float) -> None:
        """A stop string ended the answer, perhaps found only after the request had ended."""
        timeline = self.timeline(request_id)
        if timeline is None:
            return
        request = self._running(request_id)
        if request is not None:
            timeline.num_output_tokens = min(num_output_tokens, timeline.num_output_tokens)
            self._tally.add(
                CoordinatorMetric.TOKENS_BEHIND_STOP, amount=len(request.emitted) - timeline.num_output_tokens
            )
            self._custody.end(request, Move.FINISH, FinishReason.STOP, now, is_silent=True)
        else:
            unused = max(0, timeline.num_output_tokens - num_output_tokens)
            self._tally.add(CoordinatorMetric.TOKENS_BEHIND_STOP, amount=unused)
            timeline.num_output_tokens -= unused
            self._accounts.give_back(timeline.tenant, unused, now)
            if timeline.finish is FinishReason.LENGTH:
                timeline.finish = FinishReason.STOP

    def abandoned(self, request_id: str, now: float) -> None:
        """The client has left."""
        self._cancel(request_id, "the client has left", now)

    def cancelled(self, request_id: str, tenant: str, now: float) -> None:
        """Its client wants it to end."""
        timeline = self.timeline(request_id)
        if timeline is None or timeline.tenant != tenant:
            error = UnknownRequest(f"no request {request_id!r} of yours is known, so none is cancelled")
            self._emit(Refuse(request_id, error))
        else:
            self._cancel(request_id, "the request was cancelled", now)

    def cut(self, request_id: str, error: RequestError, now: float) -> None:
        """The gateway gives the request up."""
        if (request := self._running(request_id)) is not None:
            self._custody.end(request, Move.FAIL, FinishReason.ERROR, now, error=error)

    def delivered(self, request_id: str, now: float) -> None:
        """The first output is with the client's connection."""
        timeline = self.timeline(request_id)
        if timeline is not None and timeline.delivered_at is None:
            timeline.delivered_at = now
            self._tally.timings[Timing.TTFT].observe(now - timeline.received_at)

    def tick(self, now: float) -> None:
        """Ends what has reached its deadline, in whatever state, and what has waited in the queue for too long."""
        due: list[tuple[int, float, str]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, number, request_id = heappop(self._deadlines)
            due.append((number, deadline, request_id))
        for number, deadline, request_id in sorted(due):
            request = self._running(request_id)
            if request is not None and request.number == number:
                request.catch_up()
                self._tally.add(CoordinatorMetric.DEADLINES_MISSED)
                self._time_out(request, _too_late(request, deadline), now)
        for request in self._queue.waited_longer(now, self._max_wait_s):
            self._time_out(request, self._admission.waited_in_vain(now), now)

    def no_worker(self, reason: str, now: float) -> None:
        """Nothing that waits can be run any more."""
        for request in list(self._queue):
            self._custody.end(request, Move.FAIL, FinishReason.ERROR, now, error=NoWorker(reason))

    def time_out_all(self, error: RequestError, now: float) -> None:
        """Ends every request that has not ended yet, with `error`."""
        for request in list(self._custody.requests.values()):
            if request.ending is None:
                self._time_out(request, error, now)

    def knocked(self, request_id: str, tenant: Tenant, priority: int, now: float) -> None:
        """A new request whose prompt is not tokenized yet: refused at once if any prompt would be."""
        error: RequestError | None = NoWorker(STOPPING) if self.is_draining else None
        error = error or self._admission.refusal_of_any(self._accounts.of(tenant, now), priority, now)
        if error is not None:
            self._custody.ended.refuse_unheard(request_id, tenant, error, now)
            self._refuse(request_id, error)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        self._tally.add(CoordinatorMetric.REQUESTS, RequestState.REJECTED)
        self._tally.add(CoordinatorMetric.REFUSED, error.code or error.kind)
        self._emit(Refuse(request_id, error))

    def _refusal(self, request: Request, now: float) -> RequestError | None:
        if self.is_draining:
            return NoWorker(STOPPING)
        num_cached = 0 if request.submission.deadline is None else self._router.best_match(request)
        return self._admission.refusal(request, num_cached, now)

    def _running(self, request_id: str) -> Request | None:
        """The request, unless its outcome is decided."""
        request = self._custody.requests.get(request_id)
        return request if request is not None and request.ending is None else None

    def _cancel(self, request_id: str, reason: str, now: float) -> None:
        if (request := self._running(request_id)) is not None:
            error = RequestCancelled(reason)
            self._custody.end(request, Move.CANCEL, FinishReason.CANCELLED, now, error=error)

    def _time_out(self, request: Request, error: RequestError, now: float) -> None:
        self._custody.end(request, Move.TIME_OUT, FinishReason.TIMEOUT, now, error=error)


def _too_late(request: Request, deadline: float) -> DeadlineExceeded:
    given_s = deadline - request.submission.received_at
    return DeadlineExceeded(
        f"the answer was not complete in the {given_s:.3f} s that it was given: {len(request.emitted)} of at most "
        f"{request.submission.sampling.max_tokens} output tokens, while {request.state}"
    )
