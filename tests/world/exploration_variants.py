"""Workers with one mistake each, which the exploration must find. They differ from the real ones in that alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twinpool.decode_pool.core import DecodeCore
from twinpool.decode_pool.intake import Arrival, Intake
from twinpool.decode_pool.steps import StepsUnderWay
from twinpool.kv_transfer.ledger import LedgerEvent, OwnershipLedger, Reservation, Writer
from twinpool.messages import Dropped, DropReason, Manifest, RevokeAck
from twinpool.prefill_pool.core import PrefillCore
from twinpool.prefill_pool.handoff import ACTIVE, Handoff, Peer
from twinpool.prefill_pool.outbox import Outbox
from twinpool.request import RequestKey
from twinpool.worker.core import Command, Event, LinkLost, PeerGone, SendPeer, StepDone


class ReusesBeforeTheAcknowledgement(OwnershipLedger):
    """A revoked block is free as soon as this side has stopped receiving."""

    def receive_cancelled(self, fence: int) -> tuple[int, ...]:
        blocks = super().receive_cancelled(fence)
        if not blocks and (held := self.reservation(fence)) is not None:
            return self._leave_quarantine(held, LedgerEvent.WRITER_STOPPED)
        return blocks


class ReusesFences(OwnershipLedger):
    """Counts fences from the start again whenever nothing is lent."""

    def open(
        self, key: RequestKey, writer: Writer, block_ids: Sequence[int], now: float, timeout_s: float
    ) -> int:
        if not self._reservations:
            self._next_fence = self._first_fence
        return super().open(key, writer, block_ids, now, timeout_s)


class NeverAsksAgain(OwnershipLedger):
    """Waits forever for an acknowledgement that the network has lost."""

    def unacknowledged(self, now: float) -> tuple[Reservation, ...]:  # noqa: ARG002
        return ()


class NeverExpires(OwnershipLedger):
    """A lease that its writer has forgotten lasts."""

    def expired(self, now: float) -> tuple[int, ...]:  # noqa: ARG002
        return ()


class BelievesTheSeal(Intake):
    """Takes the KV over before its bytes have arrived."""

    def seal(self, writer: Writer, manifest: Manifest, now: float) -> Arrival | None:
        super().seal(writer, manifest, now)
        arrival = self._by_fence.get(manifest.fence)
        return self._accept(arrival, manifest, 0.0) if arrival is not None else None


class RevokesInSilence(Intake):
    """Gives up a transfer, and does not tell the writer."""

    def _send(self, writer: Writer, message: object) -> None:
        if type(message).__name__ != "Revoke":
            super()._send(writer, message)  # type: ignore[arg-type]


class AcknowledgesAtOnce(Outbox):
    """Promises to write no more before the transport has stopped."""

    def _revoke(self, peer: Peer, key: RequestKey, fence: int) -> None:
        self._commands.append(SendPeer(*peer, RevokeAck(key, fence)))
        super()._revoke(peer, key, fence)


class ReleasesUnderTheReader(Outbox):
    """Blocks of a transfer that is given up are free before the transport has stopped reading them."""

    def _wind_down(self, job: Handoff) -> None:
        was_active = job.state in ACTIVE
        super()._wind_down(job)
        if was_active and job.grant is not None:
            self.push_stopped(job.grant.fence)


class KeepsWhatIsCancelled(PrefillCore):
    """Says that a cancelled job is gone, and lets only decode give it up."""

    def _cancel(self, key: RequestKey) -> None:
        self._tell(Dropped(key, DropReason.CANCELLED))


class SealsOnce(Outbox):
    """Waits forever for the answer to a seal that the network has lost."""

    def renew(self, now: float) -> None:
        pass


class TakesTheLostForDead(DecodeCore):
    """Uses a lost writer's blocks again although its process may only be frozen."""

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, LinkLost):
            event = PeerGone(event.worker_id, event.incarnation)
        return super().handle(event, now)


class ForgetsWhatFollows(StepsUnderWay):
    """The end of a step counts as the end of all steps."""

    def end(self, done: StepDone) -> None:
        super().end(done)
        self._in_use = set()


class ReleasesUnderTheFollowingStep(DecodeCore):
    """A cancelled sequence gives up its blocks although the step that has begun meanwhile uses them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._steps = ForgetsWhatFollows()


def with_ledger(kind: type[OwnershipLedger]) -> Callable[..., Any]:
    """A decode core whose ledger is of that kind."""

    def make(*arguments: Any) -> DecodeCore:
        core = DecodeCore(*arguments)
        core._ledger.__class__ = kind
        return core

    return make


def with_intake(kind: type[Intake]) -> Callable[..., Any]:
    """A decode core whose intake is of that kind."""

    def make(*arguments: Any) -> DecodeCore:
        core = DecodeCore(*arguments)
        core._intake.__class__ = kind
        return core

    return make


def with_outbox(kind: type[Outbox]) -> Callable[..., Any]:
    """A prefill core whose outbox is of that kind."""

    def make(*arguments: Any) -> PrefillCore:
        core = PrefillCore(*arguments)
        core._outbox.__class__ = kind
        return core

    return make
