"""Wrong about blocks: who owns them, for how long, and how they are handed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.lifecycle import Leg
from twinpool.coordinator.membership import Membership
from twinpool.coordinator.worker import Worker
from twinpool.decode_pool.core import DecodeCore
from twinpool.decode_pool.intake import Arrival, Intake
from twinpool.decode_pool.steps import StepsUnderWay
from twinpool.engine.batch import StepOutput
from twinpool.engine.block_pool import BlockPool
from twinpool.kv_transfer import manifest
from twinpool.kv_transfer.ledger import LedgerEvent, OwnershipLedger, Writer
from twinpool.messages import Manifest, Renew, StepTokens, Token
from twinpool.prefill_pool.handoff import Handoff
from twinpool.prefill_pool.outbox import Outbox
from twinpool.worker.core import (
    Event,
    FromCoordinator,
    LinkLost,
    PeerGone,
    PlanAhead,
    SendPeer,
    StepDone,
    StepPlan,
    Tick,
)
from world.wrong_variants import Catalogue

VARIANTS = Catalogue()


# ── who owns a block ────────────────────────────────────────────────────────────────────────────────────────


@VARIANTS.add
def reuse_before_the_writers_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """Revoked blocks leave quarantine as soon as this side has stopped receiving."""
    honest = OwnershipLedger.receive_cancelled

    def receive_cancelled(self: OwnershipLedger, fence: int) -> tuple[int, ...]:
        held = self.reservation(fence)
        freed = honest(self, fence)
        return freed or (self._leave_quarantine(held, LedgerEvent.WRITER_STOPPED) if held else ())

    patch.setattr(OwnershipLedger, "receive_cancelled", receive_cancelled)


@VARIANTS.add
def a_lost_process_is_not_ended(patch: pytest.MonkeyPatch) -> None:
    """A frozen worker of the server's own counts as lost, and lives on with what it holds."""
    honest = Membership.remove

    def remove(self: Membership, worker: Worker, reason: str) -> None:
        worker.has_left = True
        honest(self, worker, reason)

    patch.setattr(Membership, "remove", remove)


@VARIANTS.add
def a_lost_writer_counts_as_dead(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a frozen one-sided writer are given to others, and then it goes on."""
    honest = DecodeCore.handle

    def handle(self: DecodeCore, event: Event, now: float) -> list[Any]:
        if isinstance(event, LinkLost):
            event = PeerGone(event.worker_id, event.incarnation)
        return honest(self, event, now)

    patch.setattr(DecodeCore, "handle", handle)


@VARIANTS.add
def a_push_does_not_pin_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """A given-up hand-off releases its blocks while the transport may still read them."""
    honest = Outbox._wind_down

    def wind_down(self: Outbox, job: Handoff) -> None:
        if job.prompt.table and job.key not in self.in_step:
            self._pool.release(job.prompt.table)
            job.prompt.table = None
        honest(self, job)

    patch.setattr(Outbox, "_wind_down", wind_down)


@VARIANTS.add
def fences_start_anew_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """Every process counts its fences from one, so those of two are taken for each other."""
    honest = OwnershipLedger.__init__

    def init(self: OwnershipLedger, incarnation: str, counters: Any) -> None:
        honest(self, incarnation, counters)
        self._first_fence = self._next_fence = 1

    patch.setattr(OwnershipLedger, "__init__", init)


@VARIANTS.add
def a_grant_without_growth_headroom(patch: pytest.MonkeyPatch) -> None:
    """Decode admits with the blocks of the prompt alone."""
    honest = Intake._try_grant

    def try_grant(self: Intake, arrival: Arrival, now: float) -> bool:
        self._headroom_tokens = 0
        return honest(self, arrival, now)

    patch.setattr(Intake, "_try_grant", try_grant)


@VARIANTS.add
def blocks_are_findable_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    """A granted table is put into the prefix index at once, when its KV is still to come."""
    honest = Intake._try_grant

    def try_grant(self: Intake, arrival: Arrival, now: float) -> bool:
        granted = honest(self, arrival, now)
        if granted and arrival.table:
            self._pool.seal(arrival.table, arrival.chain, len(arrival.job.token_ids))
        return granted

    patch.setattr(Intake, "_try_grant", try_grant)


@VARIANTS.add
def a_shared_block_is_given_back_by_its_first_reader(patch: pytest.MonkeyPatch) -> None:
    """Releasing a table frees its blocks although other sequences read them."""
    honest = BlockPool._give_back

    def give_back(
        self: BlockPool, block_ids: Sequence[int], digests: Sequence[bytes | None], *, has_duplicates: bool
    ) -> None:
        for block in block_ids:
            self._num_further_readers -= self._readers[block] - 1
            self._readers[block] = 1
        honest(self, block_ids, digests, has_duplicates=has_duplicates)

    patch.setattr(BlockPool, "_give_back", give_back)


# ── steps that follow without a gap ─────────────────────────────────────────────────────────────────────────


@VARIANTS.add
def a_cancelled_sequence_is_released_although_the_following_step_has_it(patch: pytest.MonkeyPatch) -> None:
    """The end of a step counts as the end of all steps."""
    honest = StepsUnderWay.end

    def end(self: StepsUnderWay, done: StepDone) -> None:
        honest(self, done)
        self._in_use = set()

    patch.setattr(StepsUnderWay, "end", end)


@VARIANTS.add
def a_plan_ahead_uses_nothing_until_it_is_known_to_run(patch: pytest.MonkeyPatch) -> None:
    """A sequence that joined with it is released while it may have begun."""
    honest = StepsUnderWay.plan_ahead

    def plan_ahead(self: StepsUnderWay, make: Callable[[StepPlan], PlanAhead | None]) -> PlanAhead | None:
        before = set(self._in_use)
        ahead = honest(self, make)
        self._in_use = before
        return ahead

    patch.setattr(StepsUnderWay, "plan_ahead", plan_ahead)


@VARIANTS.add
def a_stale_plan_ahead_is_begun(patch: pytest.MonkeyPatch) -> None:
    """Whatever was planned last follows, after whichever step."""
    honest = PlanAhead.resolve

    def resolve(self: PlanAhead, ran: StepPlan, output: StepOutput) -> StepPlan | None:
        return honest(replace(self, after=ran), ran, output)

    patch.setattr(PlanAhead, "resolve", resolve)


@VARIANTS.add
def an_ended_sequence_follows(patch: pytest.MonkeyPatch) -> None:
    """The token that ends an answer is fed back like any other."""
    honest = PlanAhead.resolve

    def resolve(self: PlanAhead, ran: StepPlan, output: StepOutput) -> StepPlan | None:
        endless = [replace(a, job=dataclasses.replace(a.job, eos_token_ids=())) for a in self.awaited]
        return honest(replace(self, awaited=tuple(endless)), ran, output)

    patch.setattr(PlanAhead, "resolve", resolve)


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────


@VARIANTS.add
def a_lease_is_compared_across_clocks(patch: pytest.MonkeyPatch) -> None:
    """A renewal says when it was sent, by the writer's clock, and decode's lease runs from there."""
    honest_renew, honest_intake = Outbox.renew, Intake.renew

    def renew(self: Outbox, now: float) -> None:
        before = len(self._commands)
        honest_renew(self, now)
        for at, command in enumerate(self._commands[before:], before):
            if isinstance(command, SendPeer) and isinstance(command.message, Renew):
                message = Renew((*command.message.fences, int(now * 1000)))
                self._commands[at] = SendPeer(command.worker_id, command.incarnation, message)

    def intake(self: Intake, writer: Writer, fences: Sequence[int], now: float) -> None:  # noqa: ARG001
        honest_intake(self, writer, fences[:-1], fences[-1] / 1000)

    patch.setattr(Outbox, "renew", renew)
    patch.setattr(Intake, "renew", intake)


@VARIANTS.add
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


@VARIANTS.add
def a_seal_is_sent_once(patch: pytest.MonkeyPatch) -> None:
    """If its acknowledgement is lost, prefill holds the blocks for ever."""
    honest = Outbox._seal

    def seal(self: Outbox, job: Handoff, finished: Any) -> None:
        honest(self, job, finished)
        job.seal = None

    patch.setattr(Outbox, "_seal", seal)


@VARIANTS.add
def a_revocation_is_sent_once(patch: pytest.MonkeyPatch) -> None:
    """If it is lost, its blocks stay in quarantine for ever."""
    patch.setattr(OwnershipLedger, "unacknowledged", lambda self, now: ())  # noqa: ARG005


# ── the hand-off ────────────────────────────────────────────────────────────────────────────────────────────


@VARIANTS.add
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


@VARIANTS.add
def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Whatever arrives is taken for what was sent."""
    patch.setattr(manifest, "check_digests", lambda region, block_ids, wanted: None)  # noqa: ARG005


@VARIANTS.add
def decode_says_the_first_token_again(patch: pytest.MonkeyPatch) -> None:
    """Prefill has streamed it already."""
    honest = DecodeCore._join

    def join(self: DecodeCore, arrival: Arrival | None) -> None:
        honest(self, arrival)
        if arrival and arrival.manifest:
            token = Token(arrival.key, arrival.job.num_emitted, arrival.manifest.first_token)
            self._tell(StepTokens((token,)))

    patch.setattr(DecodeCore, "_join", join)


@VARIANTS.add
def a_token_that_comes_twice_is_not_recognised(patch: pytest.MonkeyPatch) -> None:
    """Decode says the first token again, and the coordinator takes every token for the next one."""
    decode_says_the_first_token_again(patch)
    honest = Delivery.take

    def take(self: Delivery, leg: Leg, token: Token, now: float) -> None:
        expected = len(leg.request.emitted)
        honest(self, leg, Token(token.key, max(token.index, expected), token.token_id, token.finish), now)

    patch.setattr(Delivery, "take", take)
