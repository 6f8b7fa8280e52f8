"""The receiver's ownership ledger: who may write which blocks, and when a block is safe to reuse.

A decode worker reserves blocks for a writer (one prefill process) under a fence. The reservation ends in
one of two ways, and hands its blocks back exactly once in either:

- sealed by the writer, verified, and *accepted*: the blocks pass to the caller as owner;
- *revoked* (cancelled, expired, corrupt, writer lost): the blocks stay in quarantine until this side has
  stopped receiving **and** the writer has acknowledged, or is known dead. Only then can no late byte hit a
  new owner.

The ledger deals in block ids; which of them are free or cached is the block pool's business. It has no
clock: every `now` is the caller's, in seconds, and no time of another process enters it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from math import inf
from typing import NamedTuple

from twinpool.errors import InvariantViolation
from twinpool.metrics import Counters, WorkerMetric
from twinpool.request import RequestKey


class Writer(NamedTuple):
    """The one process that may write under a reservation."""

    worker_id: str
    incarnation: str


class ReservationState(StrEnum):
    """Where a reservation is in its life. The last two are terminal: its blocks have left the ledger."""

    OPEN = "open"
    SEALED = "sealed"
    QUARANTINED = "quarantined"
    AWAITS_WRITER = "awaits writer"
    AWAITS_RECEIVE = "awaits receive"
    ACCEPTED = "accepted"
    RELEASED = "released"


class LedgerEvent(StrEnum):
    """What can happen to a reservation."""

    SEAL = "seal"
    ACCEPT = "accept"
    REVOKE = "revoke"
    RECEIVE_CANCELLED = "receive cancelled"
    WRITER_STOPPED = "writer stopped"


_MOVES: dict[tuple[ReservationState, LedgerEvent], ReservationState] = {
    (ReservationState.OPEN, LedgerEvent.SEAL): ReservationState.SEALED,
    (ReservationState.OPEN, LedgerEvent.REVOKE): ReservationState.QUARANTINED,
    (ReservationState.SEALED, LedgerEvent.ACCEPT): ReservationState.ACCEPTED,
    (ReservationState.SEALED, LedgerEvent.REVOKE): ReservationState.QUARANTINED,
    (ReservationState.QUARANTINED, LedgerEvent.RECEIVE_CANCELLED): ReservationState.AWAITS_WRITER,
    (ReservationState.QUARANTINED, LedgerEvent.WRITER_STOPPED): ReservationState.AWAITS_RECEIVE,
    (ReservationState.AWAITS_WRITER, LedgerEvent.WRITER_STOPPED): ReservationState.RELEASED,
    (ReservationState.AWAITS_RECEIVE, LedgerEvent.RECEIVE_CANCELLED): ReservationState.RELEASED,
}
_LIVE = frozenset({ReservationState.OPEN, ReservationState.SEALED})
_AWAITS_WRITER = frozenset({ReservationState.QUARANTINED, ReservationState.AWAITS_WRITER})
_TERMINAL = frozenset({ReservationState.ACCEPTED, ReservationState.RELEASED})


@dataclass(slots=True)
class Reservation:
    """Blocks lent to a writer under `fence`.

    At `deadline`, on the caller's clock, the lease runs out, or the wait for the acknowledgement of its revocation.
    `story` is for errors.
    """

    fence: int
    key: RequestKey
    writer: Writer
    block_ids: tuple[int, ...]
    timeout_s: float
    deadline: float
    state: ReservationState = ReservationState.OPEN
    writer_is_gone: bool = False
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = ", ".join(self.story)
        return (
            f"fence {self.fence} ({len(self.block_ids)} blocks for {self.key.request_id}#{self.key.attempt}, "
            f"writer {self.writer.worker_id}/{self.writer.incarnation}, {self.state}; story: {told})"
        )


@dataclass(frozen=True, slots=True)
class Orphans:
    """What a dead writer leaves: blocks that are free to reuse at once, and fences that still live.

    The caller revokes each of `fences`, except a sealed one whose bytes it is still verifying: those may be
    all there.
    """

    released: tuple[int, ...]
    fences: tuple[int, ...]


class OwnershipLedger:
    """All reservations of one receiver.

    Fences start at a number drawn from the process's incarnation and only grow: this process never uses one
    twice. Nor does one of a predecessor of the same name fit by accident; it could not reach this process
    anyway, since a transport's address belongs to one incarnation.

    Events that the network can delay or repeat (`sealed`, `writer_acknowledged`) and answers that may come
    late (`accept`, `receive_cancelled`, `revoke`, `renew`) are counted as STALE_FENCES and otherwise ignored
    when their reservation has ended or does not wait for them. What only a bug can cause raises
    InvariantViolation: a block reserved twice, a fence that this ledger never gave used by this process, an
    acceptance before the seal.
    """

    def __init__(self, incarnation: str, counters: Counters) -> None:
        self._first_fence = int.from_bytes(blake2b(incarnation.encode(), digest_size=4).digest(), "big") + 1
        self._next_fence = self._first_fence
        self._reservations: dict[int, Reservation] = {}
        self._lent: set[int] = set()
        """The blocks of all reservations."""
        self._counters = counters

    # ── a reservation that goes well ────────────────────────────────────────────────────────────────────────

    def open(
        self, key: RequestKey, writer: Writer, block_ids: Sequence[int], now: float, timeout_s: float
    ) -> int:
        """Lends `block_ids`, which the caller has taken from its pool, to `writer`; returns the new fence.

        The lease runs out `timeout_s` after `now` unless renewed. An empty `block_ids` (all cached here) is
        fine.

        Raises:
            InvariantViolation: a block is listed twice, or already lent.
        """
        blocks = tuple(block_ids)
        if not self._lent.isdisjoint(blocks):
            block = next(block for block in blocks if block in self._lent)
            other = next(held for held in self._reservations.values() if block in held.block_ids)
            raise InvariantViolation(f"block {block} is lent already under {other}")
        if len(set(blocks)) != len(blocks):
            raise InvariantViolation(f"a block is listed twice in a reservation for {key}: {blocks}")
        fence = self._next_fence
        self._next_fence += 1
        self._reservations[fence] = Reservation(
            fence, key, writer, blocks, timeout_s, now + timeout_s, story=[f"open at {now:.3f}"]
        )
        self._lent.update(blocks)
        return fence

    def renew(self, fence: int, now: float) -> bool:
        """Starts the lease anew at `now`. False if the fence is no longer live."""
        if (held := self._live(fence)) is None:
            return False
        held.deadline = now + held.timeout_s
        return True

    def sealed(self, fence: int, writer: Writer, now: float) -> bool:
        """The writer says that all bytes are on their way, and renews the lease. True: verify them now.

        False (counted): an old or foreign fence, another writer's, or a second seal.
        """
        held = self._reservations.get(fence)
        if held is None or held.writer != writer or held.state is not ReservationState.OPEN:
            self._counters.add(WorkerMetric.STALE_FENCES)
            return False
        self._move(held, LedgerEvent.SEAL, f"sealed at {now:.3f}")
        held.deadline = now + held.timeout_s
        return True

    def accept(self, fence: int) -> tuple[int, ...] | None:
        """The bytes are verified: the reservation ends, and the caller owns its blocks, which are returned.

        None (counted) if the reservation was revoked or ended meanwhile: then the blocks are not the
        caller's.

        Raises:
            InvariantViolation: the reservation is not sealed yet, or the fence was never given.
        """
        if (held := self._live(fence)) is None:
            return None
        self._move(held, LedgerEvent.ACCEPT, "accepted")
        return self._end(held)

    # ── a reservation that does not ─────────────────────────────────────────────────────────────────────────

    def revoke(self, fence: int, now: float, reason: str) -> bool:
        """Takes the right to write back; the blocks enter quarantine.

        True: the caller must now cancel the receive and, unless the writer is known to be gone, send it a
        Revoke. False (counted): the reservation is revoked or ended already.

        Raises:
            InvariantViolation: the fence was never given.
        """
        if (held := self._live(fence)) is None:
            return False
        self._move(held, LedgerEvent.REVOKE, f"revoked at {now:.3f} ({reason})")
        held.deadline = now + held.timeout_s
        if held.writer_is_gone:
            self._move(held, LedgerEvent.WRITER_STOPPED, "writer was gone")
        return True

    def receive_cancelled(self, fence: int) -> tuple[int, ...]:
        """This side has stopped receiving. Returns the blocks if that frees them, else nothing.

        Raises:
            InvariantViolation: the fence was never given, or is not revoked.
        """
        if (held := self._known(fence)) is None:
            return ()
        if held.state in _LIVE:
            raise InvariantViolation(
                f"the receive of a reservation that is not revoked was cancelled: {held}"
            )
        return self._leave_quarantine(held, LedgerEvent.RECEIVE_CANCELLED)

    def writer_acknowledged(self, fence: int, writer: Writer) -> tuple[int, ...]:
        """The writer promises to write no more. Returns the blocks if that frees them, else nothing.

        An acknowledgement that nobody asked for (not revoked, another writer, an old fence) is counted and
        ignored.
        """
        held = self._reservations.get(fence)
        if held is None or held.writer != writer or held.state in _LIVE:
            self._counters.add(WorkerMetric.STALE_FENCES)
            return ()
        return self._leave_quarantine(held, LedgerEvent.WRITER_STOPPED)

    def writer_gone(self, writer: Writer) -> Orphans:
        """That process is dead and writes no more. Returns what becomes of its reservations."""
        released: list[int] = []
        fences: list[int] = []
        for held in [r for r in self._reservations.values() if r.writer == writer]:
            if held.state in _LIVE:
                held.writer_is_gone = True
                held.story.append("writer gone")
                fences.append(held.fence)
            elif held.state is not ReservationState.AWAITS_RECEIVE:
                released.extend(self._leave_quarantine(held, LedgerEvent.WRITER_STOPPED))
        return Orphans(tuple(released), tuple(fences))

    def expired(self, now: float) -> tuple[int, ...]:
        """The live fences whose lease has run out by `now`. The caller revokes them."""
        return tuple(r.fence for r in self._reservations.values() if r.state in _LIVE and r.deadline <= now)

    def unacknowledged(self, now: float) -> tuple[Reservation, ...]:
        """The revoked reservations for whose writer's acknowledgement a whole lease was waited in vain; the wait starts
        anew. The caller sends those writers a Revoke again, since a message can be lost.
        """
        silent = tuple(
            r for r in self._reservations.values() if r.state in _AWAITS_WRITER and r.deadline <= now
        )
        for held in silent:
            held.deadline = now + held.timeout_s
        return silent

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def next_deadline(self) -> float:
        """When the first lease, or wait for an acknowledgement, runs out; infinite if there is none."""
        return min((held.deadline for held in self._reservations.values()), default=inf)

    @property
    def num_reserved(self) -> int:
        """Blocks lent under live fences."""
        return sum(len(r.block_ids) for r in self._reservations.values() if r.state in _LIVE)

    @property
    def num_quarantined(self) -> int:
        """Blocks of revoked reservations that are not safe to reuse yet."""
        return sum(len(r.block_ids) for r in self._reservations.values() if r.state not in _LIVE)

    def reservation(self, fence: int) -> Reservation | None:
        """The reservation under `fence`, live or in quarantine; None if it has ended or never was."""
        return self._reservations.get(fence)

    def has_ended(self, fence: int) -> bool:
        """Whether this ledger gave `fence`, and its reservation is over."""
        return self._first_fence <= fence < self._next_fence and fence not in self._reservations

    def reservations(self) -> Iterable[Reservation]:
        """All reservations that hold blocks, oldest first."""
        return self._reservations.values()

    def check(self) -> None:
        """Raises InvariantViolation unless every block here has exactly one reservation, which lists it."""
        lent = [block for held in self._reservations.values() for block in held.block_ids]
        if len(lent) != len(self._lent) or set(lent) != self._lent:
            raise InvariantViolation(f"{len(lent)} blocks are lent, {len(self._lent)} are counted")
        for held in self._reservations.values():
            if held.state in _TERMINAL:
                raise InvariantViolation(f"an ended reservation still holds blocks: {held}")

    # ── moves ───────────────────────────────────────────────────────────────────────────────────────────────

    def _known(self, fence: int) -> Reservation | None:
        if not self._first_fence <= fence < self._next_fence:
            raise InvariantViolation(
                f"fence {fence} was never given; given so far: {self._first_fence} to {self._next_fence - 1}"
            )
        if (held := self._reservations.get(fence)) is None:
            self._counters.add(WorkerMetric.STALE_FENCES)
        return held

    def _live(self, fence: int) -> Reservation | None:
        held = self._known(fence)
        if held is not None and held.state not in _LIVE:
            self._counters.add(WorkerMetric.STALE_FENCES)
            return None
        return held

    def _move(self, held: Reservation, event: LedgerEvent, told: str) -> None:
        if (state := _MOVES.get((held.state, event))) is None:
            raise InvariantViolation(f"{event} is not allowed now: {held}")
        held.state = state
        held.story.append(told)

    def _leave_quarantine(self, held: Reservation, event: LedgerEvent) -> tuple[int, ...]:
        if (held.state, event) not in _MOVES:
            self._counters.add(WorkerMetric.STALE_FENCES)
            return ()
        self._move(held, event, event.value)
        return self._end(held) if held.state is ReservationState.RELEASED else ()

    def _end(self, held: Reservation) -> tuple[int, ...]:
        del self._reservations[held.fence]
        num_lent = len(self._lent) - len(held.block_ids)
        self._lent.difference_update(held.block_ids)
        if len(self._lent) != num_lent:
            raise InvariantViolation(f"blocks leave the ledger that are not lent: {held}")
        return held.block_ids
