"""Deliberately wrong variants of the real cores: the world must find every one of them.

Each is a function that patches one thing; its docstring says what is wrong then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from twinpool.coordinator import custody
from twinpool.coordinator.custody import Custody
from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.lifecycle import Leg, Move, Request
from twinpool.coordinator.membership import Membership
from twinpool.coordinator.registry import Registry, Worker
from twinpool.coordinator.state import CoordinatorCore
from twinpool.decode_pool.core import DecodeCore
from twinpool.decode_pool.intake import Arrival, Intake
from twinpool.decode_pool.scheduler import DecodeScheduler
from twinpool.engine.block_pool import BlockPool
from twinpool.kv_transfer import manifest
from twinpool.kv_transfer.ledger import LedgerEvent, OwnershipLedger, Writer
from twinpool.messages import Cancel, Manifest, Message, Renew, StepTokens, Token
from twinpool.metrics import CoordinatorMetric
from twinpool.prefill_pool.core import PrefillCore
from twinpool.prefill_pool.handoff import Handoff
from twinpool.request import Job, RequestKey
from twinpool.worker.core import Event, FromCoordinator, LinkLost, PeerGone, SendPeer, Tick

Variant = Callable[[pytest.MonkeyPatch], None]
VARIANTS: list[Variant] = []


def variant(patch: Variant) -> Variant:
    """Puts it on the list."""
    VARIANTS.append(patch)
    return patch


# ── who owns a block ────────────────────────────────────────────────────────────────────────────────────────


@variant
def reuse_before_the_writers_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """Revoked blocks leave quarantine as soon as this side has stopped receiving."""
    honest = OwnershipLedger.receive_cancelled

    def receive_cancelled(self: OwnershipLedger, fence: int) -> tuple[int, ...]:
        held = self.reservation(fence)
        freed = honest(self, fence)
        return freed or (self._leave_quarantine(held, LedgerEvent.WRITER_STOPPED) if held else ())

    patch.setattr(OwnershipLedger, "receive_cancelled", receive_cancelled)


@variant
def a_lost_process_is_not_ended(patch: pytest.MonkeyPatch) -> None:
    """A frozen worker of the server's own counts as lost, and lives on with what it holds."""
    honest = Membership.remove

    def remove(self: Membership, worker: Worker, reason: str) -> None:
        worker.has_left = True
        honest(self, worker, reason)

    patch.setattr(Membership, "remove", remove)


@variant
def a_lost_writer_counts_as_dead(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a frozen one-sided writer are given to others, and then it goes on."""
    honest = DecodeCore.handle

    def handle(self: DecodeCore, event: Event, now: float) -> list[Any]:
        if isinstance(event, LinkLost):
            event = PeerGone(event.worker_id, event.incarnation)
        return honest(self, event, now)

    patch.setattr(DecodeCore, "handle", handle)


@variant
def a_push_does_not_pin_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """A given-up hand-off releases its blocks while the transport may still read them."""
    honest = PrefillCore._wind_down

    def wind_down(self: PrefillCore, job: Handoff) -> None:
        if job.prompt.table and job.key not in self._running:
            self.pool.release(job.prompt.table)
            job.prompt.table = None
        honest(self, job)

    patch.setattr(PrefillCore, "_wind_down", wind_down)


@variant
def fences_start_anew_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """Every process counts its fences from one, so those of two are taken for each other."""
    honest = OwnershipLedger.__init__

    def init(self: OwnershipLedger, incarnation: str, counters: Any) -> None:
        honest(self, incarnation, counters)
        self._first_fence = self._next_fence = 1

    patch.setattr(OwnershipLedger, "__init__", init)


@variant
def a_grant_without_growth_headroom(patch: pytest.MonkeyPatch) -> None:
    """Decode admits with the blocks of the prompt alone."""
    honest = Intake._try_grant

    def try_grant(self: Intake, arrival: Arrival, now: float) -> bool:
        self._headroom_tokens = 0
        return honest(self, arrival, now)

    patch.setattr(Intake, "_try_grant", try_grant)


@variant
def blocks_are_findable_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    """A granted table is put into the prefix index at once, when its KV is still to come."""
    honest = Intake._try_grant

    def try_grant(self: Intake, arrival: Arrival, now: float) -> bool:
        granted = honest(self, arrival, now)
        if granted and arrival.table:
            self._pool.seal(arrival.table, arrival.chain, len(arrival.job.token_ids))
        return granted

    patch.setattr(Intake, "_try_grant", try_grant)


@variant
def a_shared_block_is_given_back_by_its_first_reader(patch: pytest.MonkeyPatch) -> None:
    """Releasing a table frees its blocks although other sequences read them."""
    honest = BlockPool._give_back

    def give_back(self: BlockPool, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self._readers[block] = min(self._readers[block], 1)
        honest(self, block_ids)

    patch.setattr(BlockPool, "_give_back", give_back)


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────


@variant
def a_lease_is_compared_across_clocks(patch: pytest.MonkeyPatch) -> None:
    """A renewal says when it was sent, by the writer's clock, and decode's lease runs from there."""
    honest_renew, honest_intake = PrefillCore._renew, Intake.renew

    def renew(self: PrefillCore, now: float) -> None:
        before = len(self._commands)
        honest_renew(self, now)
        for at, command in enumerate(self._commands[before:], before):
            if isinstance(command, SendPeer) and isinstance(command.message, Renew):
                message = Renew((*command.message.fences, int(now * 1000)))
                self._commands[at] = SendPeer(command.worker_id, command.incarnation, message)

    def intake(self: Intake, writer: Writer, fences: Sequence[int], now: float) -> None:  # noqa: ARG001
        honest_intake(self, writer, fences[:-1], fences[-1] / 1000)

    patch.setattr(PrefillCore, "_renew", renew)
    patch.setattr(Intake, "renew", intake)


@variant
def reclaim_only_when_work_arrives(patch: pytest.MonkeyPatch) -> None:
    """Leases and reminders are looked at when a job comes, not when time passes."""
    honest = DecodeCore.handle

    def handle(self: DecodeCore, event: Event, now: float) -> list[Any]:
        if isinstance(event, Tick):
            return []
        if isinstance(event, FromCoordinator):
            self._intake.expire(now)
        return honest(self, event, now)

    patch.setattr(DecodeCore, "handle", handle)


@variant
def a_seal_is_sent_once(patch: pytest.MonkeyPatch) -> None:
    """If its acknowledgement is lost, prefill holds the blocks for ever."""
    honest = PrefillCore._seal

    def seal(self: PrefillCore, job: Handoff, finished: Any) -> None:
        honest(self, job, finished)
        job.seal = None

    patch.setattr(PrefillCore, "_seal", seal)


@variant
def a_revocation_is_sent_once(patch: pytest.MonkeyPatch) -> None:
    """If it is lost, its blocks stay in quarantine for ever."""
    patch.setattr(OwnershipLedger, "unacknowledged", lambda self, now: ())  # noqa: ARG005


# ── the hand-off ────────────────────────────────────────────────────────────────────────────────────────────


@variant
def acknowledged_before_it_is_verified(patch: pytest.MonkeyPatch) -> None:
    """Decode takes a sealed sequence in without waiting for its bytes."""
    honest = Intake.seal

    def seal(self: Intake, writer: Writer, sealed: Manifest, now: float) -> Arrival | None:
        before = len(self._commands)
        arrival = honest(self, writer, sealed, now)
        waiting = self._by_fence.get(sealed.fence)
        if arrival is None and waiting is not None and len(self._commands) > before:
            del self._commands[before:]
            return self._accept(waiting, sealed, 0.0)
        return arrival

    patch.setattr(Intake, "seal", seal)


@variant
def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Whatever arrives is taken for what was sent."""
    patch.setattr(manifest, "check_digests", lambda region, block_ids, wanted: None)  # noqa: ARG005


@variant
def decode_says_the_first_token_again(patch: pytest.MonkeyPatch) -> None:
    """Prefill has streamed it already."""
    honest = DecodeCore._join

    def join(self: DecodeCore, arrival: Arrival | None) -> None:
        honest(self, arrival)
        if arrival and arrival.manifest:
            token = Token(arrival.key, arrival.job.num_emitted, arrival.manifest.first_token)
            self._tell(StepTokens((token,)))

    patch.setattr(DecodeCore, "_join", join)


@variant
def a_token_that_comes_twice_is_not_recognised(patch: pytest.MonkeyPatch) -> None:
    """Decode says the first token again, and the coordinator takes every token for the next one."""
    decode_says_the_first_token_again(patch)
    honest = Delivery.take

    def take(self: Delivery, leg: Leg, token: Token, now: float) -> None:
        expected = len(leg.request.emitted)
        honest(self, leg, Token(token.key, max(token.index, expected), token.token_id, token.finish), now)

    patch.setattr(Delivery, "take", take)


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────


@variant
def a_cancel_reaches_one_side_only(patch: pytest.MonkeyPatch) -> None:
    """Decode is told that a request is over, prefill is not."""
    honest = Custody.send

    def send(self: Custody, worker: Worker, message: Message) -> None:
        if not (isinstance(message, Cancel) and worker.role == "prefill"):
            honest(self, worker, message)

    patch.setattr(Custody, "send", send)


@variant
def a_leg_is_closed_before_the_worker_has_let_go(patch: pytest.MonkeyPatch) -> None:
    """A request counts as ended once its Cancel is sent."""
    honest = Custody.move

    def move(self: Custody, request: Request, move: Move, now: float) -> None:
        honest(self, request, move, now)
        for leg in [leg for leg in request.legs if leg.cancelled_at is not None]:
            self.close(leg)

    patch.setattr(Custody, "move", move)


@variant
def a_cancel_waits_for_the_answer(patch: pytest.MonkeyPatch) -> None:
    """A sequence that runs is not interrupted: its client has left, and it goes on."""
    honest = DecodeCore._cancel

    def cancel(self: DecodeCore, key: RequestKey, now: float) -> None:
        if key not in self._scheduler:
            honest(self, key, now)

    patch.setattr(DecodeCore, "_cancel", cancel)


@variant
def a_retry_keeps_its_attempt_number(patch: pytest.MonkeyPatch) -> None:
    """What the old attempt still says is taken for the new one's."""
    honest = Custody.resume

    def resume(self: Custody, request: Request, *args: Any, **kwargs: Any) -> None:
        honest(self, request, *args, **kwargs)
        request.attempt = max(0, request.attempt - 1)

    patch.setattr(Custody, "resume", resume)


@variant
def words_of_a_cancelled_attempt_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A leg counts until its worker has let go, although another attempt runs."""

    def leg_of(self: CoordinatorCore, worker: Worker, key: Any, kind: Any = None) -> Leg | None:  # noqa: ARG001
        return worker.legs.get(key)

    patch.setattr(CoordinatorCore, "_leg_of", leg_of)


@variant
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


@variant
def a_cancelled_request_keeps_its_queue_slot(patch: pytest.MonkeyPatch) -> None:
    """The queue fills with requests that nobody waits for."""
    honest = custody.WaitingQueue.remove

    def remove(self: Any, request: Request) -> None:
        if request.ending is not Move.CANCEL:
            honest(self, request)

    patch.setattr(custody.WaitingQueue, "remove", remove)


@variant
def attempts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A request that is lost is started again and again."""
    patch.setattr(Request, "starts_charged", property(lambda self: 0))  # noqa: ARG005


@variant
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


@variant
def a_resumed_request_is_billed_again(patch: pytest.MonkeyPatch) -> None:
    """Tokens that the client has are counted once more for each attempt."""
    honest = Custody.resume

    def resume(self: Custody, request: Request, *args: Any, **kwargs: Any) -> None:
        self._tally.add(CoordinatorMetric.TOKENS_DELIVERED, amount=len(request.emitted))
        honest(self, request, *args, **kwargs)

    patch.setattr(Custody, "resume", resume)


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────


@variant
def a_name_is_taken_for_the_process(patch: pytest.MonkeyPatch) -> None:
    """What is said of, or by, a dead process is believed of the one that has its name now."""
    patch.setattr(Registry, "live", lambda self, worker_id, incarnation: self.get(worker_id))  # noqa: ARG005


@variant
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
