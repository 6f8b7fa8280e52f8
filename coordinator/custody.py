"""Who holds what for which request: the lifecycle table put into effect.

Every request, every leg on a worker and every queue slot is opened and closed here, so that the counts can be
checked against each other at any moment.
"""

from __future__ import annotations

from collections.abc import Callable

from twinpool.config import CoordinatorConfig
from twinpool.coordinator.accounts import Account
from twinpool.coordinator.ended import EndedRequests
from twinpool.coordinator.events import Command, Emit, Note, Send
from twinpool.coordinator.lifecycle import Leg, LegKind, Move, Request, Resource
from twinpool.coordinator.pace import AnswerLengths, Stays
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.retries import RetryBudget
from twinpool.coordinator.service import Output
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.timeline import FinishedTimelines
from twinpool.coordinator.waiting import WaitingQueue
from twinpool.coordinator.worker import Worker
from twinpool.errors import InvariantViolation, RequestError, RequestFailed
from twinpool.messages import Cancel, DropReason, Message
from twinpool.metrics import CoordinatorMetric, Timing
from twinpool.request import FinishReason, RequestKey, RequestState

RUNNING = (RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.DECODING)

LACK_OF_ROOM = frozenset({DropReason.PREEMPTED, DropReason.NO_ROOM})
"""The worker is full, which is no fault of the request: such an attempt is not charged to it."""

HANDED_ON = "handed on"
"""The worker is to leave its pool. Nothing went wrong, so this is charged to nobody; each time was asked for."""

FAULTS = frozenset({DropReason.TRANSFER, DropReason.DEADLINE})
"""Losses of a single attempt that somebody should look into, so each is a line in the log."""


class Custody:
    """All live requests and what they own; `emit` takes commands in order."""

    def __init__(
        self,
        config: CoordinatorConfig,
        queue: WaitingQueue,
        registry: Registry,
        retries: RetryBudget,
        tally: Tally,
        emit: Callable[[Command], None],
    ) -> None:
        self._max_attempts = config.max_attempts
        self._queue = queue
        self._registry = registry
        self._retries = retries
        self._tally = tally
        self._emit = emit
        self.requests: dict[str, Request] = {}
        self.answers = AnswerLengths()
        self.stays = Stays()
        self.finished = FinishedTimelines(config.finished_timelines)
        self.ended = EndedRequests(is_wanted=config.record is not None or config.is_tuned)

    def open(self, request: Request, kind: LegKind, worker: Worker, pending_tokens: int) -> None:
        """The present attempt claims `worker`, where `pending_tokens` of its prompt are to be computed."""
        key = RequestKey(request.request_id, request.attempt)
        leg = Leg(kind, key, worker, request, request.num_tokens, pending_tokens)
        request.legs.append(leg)
        worker.open(leg)

    def send(self, worker: Worker, message: Message) -> None:
        """Queues a message for the worker."""
        self._emit(Send(worker.worker_id, worker.incarnation, message))

    def serve(self, request: Request, num_tokens: int) -> None:
        """Counts prompt tokens that go to a worker, or output tokens that go to the client, for the tenant."""
        self.serve_account(request.account, num_tokens)

    def serve_account(self, account: Account, num_tokens: int) -> None:
        """As `serve`, for any request of the tenant."""
        account.serve(num_tokens)
        self._tally.add(CoordinatorMetric.TENANT_TOKENS, account.tenant.name, num_tokens)

    def leg_of(self, worker: Worker, key: RequestKey, kind: LegKind | None = None) -> Leg | None:
        """The leg of the present attempt that a message is about; None (counted) if that is over."""
        leg = worker.legs.get(key)
        if leg is None or leg.cancelled_at is not None:
            self._tally.add(CoordinatorMetric.STALE_MESSAGES)
            return None
        if kind is not None and leg.kind is not kind:
            self.fault(f"{worker.worker_id} spoke as {kind} of {key}, where it is {leg.kind}")
            return None
        return leg

    def resume(self, request: Request, reason: str, now: float, detail: str = "") -> None:
        """The present attempt is lost: start another one with the tokens so far, or give up."""
        request.catch_up()
        request.timeline.attempts[-1].ended = f"{reason}: {detail}" if detail else reason
        self._tally.add(CoordinatorMetric.ATTEMPTS_LOST, reason)
        request.forget_outputs()
        if reason in FAULTS:
            self._emit(Note(f"attempt {request.attempt} at {request.request_id} is lost: {reason}, {detail}"))
        if reason in LACK_OF_ROOM or reason == HANDED_ON:
            request.uncharged_attempts.add(request.attempt)
        if (why_not := self._why_not_again(request, reason)) is not None:
            error = RequestFailed(f"{why_not}; the last loss: {request.timeline.attempts[-1].ended}")
            self.end(request, Move.FAIL, FinishReason.ERROR, now, error=error)
            return
        self.move(request, Move.RESUME, now)
        if reason not in LACK_OF_ROOM or len(request.emitted) > request.num_emitted_at_start:
            request.queued_at = now
        self._queue.push_front(request)

    def _why_not_again(self, request: Request, reason: str) -> str | None:
        """Why the request is not started again; None: it may be, and if that is a retry, it is paid for."""
        if request.starts_charged >= self._max_attempts:
            return f"the request was lost {request.starts_charged} times and is not started again"
        if reason in LACK_OF_ROOM or reason == HANDED_ON or self._retries.try_spend():
            return None
        self._tally.add(CoordinatorMetric.RETRIES_REFUSED)
        return (
            "the request was lost and is not started again: the server's retry budget "
            f"({self._retries.size}) is used up, for too much is being lost; try again later"
        )

    def end(
        self,
        request: Request,
        move: Move,
        finish: FinishReason,
        now: float,
        *,
        error: RequestError | None = None,
        is_silent: bool = False,
    ) -> None:
        """The outcome is decided. Emits the client's last output, unless `is_silent`: it has been emitted already."""
        request.catch_up()
        self._decide(request, move, finish, now, error)
        if move is Move.FINISH:
            self._tally.timings[Timing.E2E].observe(now - request.timeline.received_at)
            self.answers.observe(request.timeline.num_output_tokens)
            if request.timeline.attempts:
                self.stays.observe(now - request.timeline.attempts[-1].started_at)
        if not is_silent:
            self._emit_last(request, finish, error)
        self.move(request, move, now)
        self.settle(request, now)

    def give_up(self, request_id: str | None, now: float) -> None:
        """A rule was broken for that request, a bug of ours: it ends with an error, and what it holds is released.

        Not by `end`: the table may allow no move out of the state that the bug has left it in.
        """
        request = self.requests.get(request_id or "")
        if request is None:
            return
        request.catch_up()
        if request.ending is None:
            error = RequestFailed(
                "the server lost track of the request, which is a bug in Twinpool; try again"
            )
            self._decide(request, Move.FAIL, FinishReason.ERROR, now, error)
            self._emit_last(request, FinishReason.ERROR, error)
        if request in self._queue:
            self._queue.remove(request)
        request.forget_outputs()
        request.give_up(now)
        self._cancel_legs(request, now)
        self.settle(request, now)

    def _decide(
        self, request: Request, ending: Move, finish: FinishReason, now: float, error: RequestError | None
    ) -> None:
        request.ending = ending
        request.timeline.ended_at = now
        request.timeline.finish = finish
        request.timeline.error = "" if error is None else error.message
        self._settle_account(request, now)
        self.ended.add(request, error, now)

    def _emit_last(self, request: Request, finish: FinishReason, error: RequestError | None) -> None:
        self._emit(Emit(request.request_id, Output((), len(request.emitted), finish, error)))

    def move(self, request: Request, move: Move, now: float) -> None:
        """Makes the move and releases what the table says."""
        released = request.move(move, now)
        if Resource.QUEUE_SLOT in released:
            self._queue.remove(request)
        if Resource.OUTPUT_BUFFER in released:
            request.forget_outputs()
        if request.state in (RequestState.QUEUED, RequestState.DRAINING):
            self._cancel_legs(request, now)
        elif Resource.PREFILL_BLOCKS in released and (prefill := request.leg(LegKind.PREFILL)):
            self.close(prefill)  # decode has acknowledged the KV: prefill lets go by itself

    def _cancel_legs(self, request: Request, now: float) -> None:
        for leg in request.legs:
            if leg.cancelled_at is None:
                leg.worker.cancel(leg, now)
                self.send(leg.worker, Cancel(leg.key))

    def _settle_account(self, request: Request, now: float) -> None:
        """Its tenant gets back what was taken at admission and not used."""
        num_prompt, num_output = request.timeline.num_prompt_tokens, request.timeline.num_output_tokens
        used = num_output + (num_prompt if request.attempt else 0)
        request.account.give_back(num_prompt + request.submission.sampling.max_tokens - used, now)
        request.account.answered(num_output)

    def close(self, leg: Leg) -> None:
        """The worker has let go of this leg, or is gone."""
        leg.worker.close(leg)
        leg.request.legs.remove(leg)

    def settle(self, request: Request, now: float) -> None:
        """Ends the request for good if its outcome is decided and no worker holds anything of it."""
        if request.ending is not None and request.state is RequestState.DRAINING and not request.legs:
            request.move(request.ending, now)
            del self.requests[request.request_id]
            self._tally.add(CoordinatorMetric.REQUESTS, request.state)
            self.finished.add(request.timeline)

    def fault(self, text: str) -> None:
        """A worker sent what it must not: counted and logged."""
        self._tally.add(CoordinatorMetric.PROTOCOL_FAULTS)
        self.note_fault(text)

    def note_fault(self, text: str) -> None:
        """Logs what should not have happened."""
        self._emit(Note(text, is_fault=True))

    def check(self) -> None:
        """Recounts who holds what.

        Raises:
            InvariantViolation: a leg, a queue slot or a sum is wrong.
        """
        legs = [leg for worker in self._registry for leg in worker.legs.values()]
        held = [leg for request in self.requests.values() for leg in request.legs]
        if {id(leg) for leg in legs} != {id(leg) for leg in held} or len(legs) != len(held):
            raise InvariantViolation(f"workers hold {len(legs)} legs, requests know of {len(held)}")
        for worker in self._registry:
            pending = sum(leg.pending_tokens for leg in worker.legs.values())
            slots = sum(leg.num_tokens for leg in worker.legs.values())
            num_sequences = sum(leg.kind is not LegKind.PREFILL for leg in worker.legs.values())
            if worker.num_sequences != num_sequences:
                raise InvariantViolation(
                    f"{worker.worker_id}: {worker.num_sequences} sequences, its legs are {num_sequences}"
                )
            if (worker.pending_tokens, worker.held_tokens) != (pending, slots):
                raise InvariantViolation(
                    f"{worker.worker_id}: {worker.pending_tokens} pending and {worker.held_tokens} held "
                    f"tokens, its legs have {pending} and {slots}"
                )
        for loads in self._registry.loads.values():
            loads.check()
        waiting = {r.request_id for r in self.requests.values() if r.state is RequestState.QUEUED}
        if waiting != {r.request_id for r in self._queue}:
            raise InvariantViolation(
                f"queued are {sorted(waiting)}, the queue has {[r.request_id for r in self._queue]}"
            )
        if self._queue.num_tokens != (tokens := sum(request.num_tokens for request in self._queue)):
            raise InvariantViolation(f"the queue counts {self._queue.num_tokens} tokens and holds {tokens}")
        for request in self.requests.values():
            running = [leg for leg in request.legs if leg.cancelled_at is None]
            if bool(running) != (request.state in RUNNING):
                raise InvariantViolation(f"{len(running)} running legs: {request.story()}")
