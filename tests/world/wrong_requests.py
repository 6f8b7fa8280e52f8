"""Wrong about requests: their attempts, their ends, and the workers that they are on."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.coordinator import custody
from twinpool.coordinator.custody import Custody
from twinpool.coordinator.ended import EndedRequests
from twinpool.coordinator.lifecycle import Leg, Move, Request
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.worker import Worker
from twinpool.decode_pool.core import DecodeCore
from twinpool.decode_pool.scheduler import DecodeScheduler
from twinpool.messages import Cancel, Message
from twinpool.metrics import CoordinatorMetric
from twinpool.request import Job, RequestKey
from world.wrong_variants import Catalogue

VARIANTS = Catalogue()


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────


@VARIANTS.add
def a_cancel_reaches_one_side_only(patch: pytest.MonkeyPatch) -> None:
    """Decode is told that a request is over, prefill is not."""
    honest = Custody.send

    def send(self: Custody, worker: Worker, message: Message) -> None:
        if not (isinstance(message, Cancel) and worker.role == "prefill"):
            honest(self, worker, message)

    patch.setattr(Custody, "send", send)


@VARIANTS.add
def what_was_refused_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """The record has only what was let in."""
    patch.setattr(EndedRequests, "refuse", lambda *_: None)


@VARIANTS.add
def a_leg_is_closed_before_the_worker_has_let_go(patch: pytest.MonkeyPatch) -> None:
    """A request counts as ended once its Cancel is sent."""
    honest = Custody.move

    def move(self: Custody, request: Request, move: Move, now: float) -> None:
        honest(self, request, move, now)
        for leg in [leg for leg in request.legs if leg.cancelled_at is not None]:
            self.close(leg)

    patch.setattr(Custody, "move", move)


@VARIANTS.add
def a_cancel_waits_for_the_answer(patch: pytest.MonkeyPatch) -> None:
    """A sequence that runs is not interrupted: its client has left, and it goes on."""
    honest = DecodeCore._cancel

    def cancel(self: DecodeCore, key: RequestKey, now: float) -> None:
        if key not in self._scheduler:
            honest(self, key, now)

    patch.setattr(DecodeCore, "_cancel", cancel)


@VARIANTS.add
def a_retry_keeps_its_attempt_number(patch: pytest.MonkeyPatch) -> None:
    """What the old attempt still says is taken for the new one's."""
    honest = Custody.resume

    def resume(self: Custody, request: Request, *args: Any, **kwargs: Any) -> None:
        honest(self, request, *args, **kwargs)
        request.attempt = max(0, request.attempt - 1)

    patch.setattr(Custody, "resume", resume)


@VARIANTS.add
def words_of_a_cancelled_attempt_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A leg counts until its worker has let go, although another attempt runs."""

    def leg_of(self: Custody, worker: Worker, key: Any, kind: Any = None) -> Leg | None:  # noqa: ARG001
        return worker.legs.get(key)

    patch.setattr(Custody, "leg_of", leg_of)


@VARIANTS.add
def a_resumed_request_forgets_what_it_has_said(patch: pytest.MonkeyPatch) -> None:
    """The next attempt starts from the prompt, but goes on counting."""
    honest = Request.job

    def job(self: Request, eos_token_ids: tuple[int, ...]) -> Job:
        whole = honest(self, eos_token_ids)
        num_prompt = whole.num_prompt
        said = tuple(1 for _ in whole.token_ids[num_prompt:])
        return Job(**{**_fields(whole), "token_ids": whole.token_ids[:num_prompt] + said})

    patch.setattr(Request, "job", job)


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__slots__}


@VARIANTS.add
def a_cancelled_request_keeps_its_queue_slot(patch: pytest.MonkeyPatch) -> None:
    """The queue fills with requests that nobody waits for."""
    honest = custody.WaitingQueue.remove

    def remove(self: Any, request: Request) -> None:
        if request.ending is not Move.CANCEL:
            honest(self, request)

    patch.setattr(custody.WaitingQueue, "remove", remove)


@VARIANTS.add
def attempts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A request that is lost is started again and again."""
    patch.setattr(Request, "starts_charged", property(lambda self: 0))  # noqa: ARG005


@VARIANTS.add
def a_cancel_ends_without_a_last_output(patch: pytest.MonkeyPatch) -> None:
    """The stream of a cancelled request just stops."""
    honest = Custody.end

    def end(self: Custody, request: Request, move: Move, *args: Any, **kwargs: Any) -> None:
        honest(
            self,
            request,
            move,
            *args,
            **{**kwargs, "is_silent": kwargs.get("is_silent") or move is Move.CANCEL},
        )

    patch.setattr(Custody, "end", end)


@VARIANTS.add
def a_resumed_request_is_billed_again(patch: pytest.MonkeyPatch) -> None:
    """Tokens that the client has are counted once more for each attempt."""
    honest = Custody.resume

    def resume(self: Custody, request: Request, *args: Any, **kwargs: Any) -> None:
        self._tally.add(CoordinatorMetric.TOKENS_DELIVERED, amount=len(request.emitted))
        honest(self, request, *args, **kwargs)

    patch.setattr(Custody, "resume", resume)


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────


@VARIANTS.add
def a_name_is_taken_for_the_process(patch: pytest.MonkeyPatch) -> None:
    """What is said of, or by, a dead process is believed of the one that has its name now."""
    patch.setattr(Registry, "live", lambda self, worker_id, incarnation: self.get(worker_id))  # noqa: ARG005


@VARIANTS.add
def the_oldest_sequence_is_preempted(patch: pytest.MonkeyPatch) -> None:
    """Room is taken from whoever is nearest to its end, so that nothing moves."""

    def has_room(self: DecodeScheduler, sequence: Any, preempted: list[Any], make_room: Any) -> bool:
        if len(sequence.token_ids) <= len(sequence.table) * self._pool.block_size:
            return True
        while not self._pool.try_grow(sequence.table):
            if make_room and make_room():
                continue
            if len(self._running) == 1:
                return False
            oldest = next(iter(self._running))
            self.leave(oldest)
            preempted.append(oldest)
            if oldest == sequence.key:
                return False
        return True

    patch.setattr(DecodeScheduler, "_has_room", has_room)
