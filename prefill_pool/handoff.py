"""One job's way through a prefill worker: from its prompt to KV that decode has taken, or to nothing at all.

::

    WAITING ──grant──► PUSHING ──all computed──► FINISHING ──handed over──► SEALED ──ack──► CLOSED
       │                  │  └── and decode had every block ───────────────────┘
       │                  └── given up, in any of these three ──► STOPPING ──stopped──► CLOSED
       └── given up ──► CLOSED

A handoff that is computed while WAITING is *parked*. Blocks leave this worker's hands only in CLOSED, and
only when no step computes them: until then the model writes them or the transport reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.errors import InvariantViolation
from twinpool.layout import KVLayout
from twinpool.messages import Dropped, Manifest, PushTo, Renew, RevokeAck, Seal
from twinpool.prefill_pool.scheduler import Prompt
from twinpool.request import RequestKey
from twinpool.worker.core import BlockPush, PushFinished, SendPeer


class HandoffState(StrEnum):
    """Where the transfer is; how far the prompt is, its `Prompt` says."""

    WAITING = "waiting"
    PUSHING = "pushing"
    FINISHING = "finishing"
    SEALED = "sealed"
    STOPPING = "stopping"
    CLOSED = "closed"


_MOVES: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.WAITING: frozenset({HandoffState.PUSHING, HandoffState.CLOSED}),
    HandoffState.PUSHING: frozenset(
        {HandoffState.FINISHING, HandoffState.SEALED, HandoffState.STOPPING, HandoffState.CLOSED}
    ),
    HandoffState.FINISHING: frozenset({HandoffState.SEALED, HandoffState.STOPPING, HandoffState.CLOSED}),
    HandoffState.SEALED: frozenset({HandoffState.STOPPING, HandoffState.CLOSED}),
    HandoffState.STOPPING: frozenset({HandoffState.CLOSED}),
    HandoffState.CLOSED: frozenset(),
}

Peer = tuple[str, str]
"""A decode worker's id and incarnation."""

MAX_REVOKED_FENCES = 4096
RENEWALS_PER_LEASE = 4
ACTIVE = frozenset({HandoffState.PUSHING, HandoffState.FINISHING, HandoffState.SEALED})
"""The grant is in use: bytes may be on their way."""


class RevokedFences:
    """Fences that decode revoked before their grant came here, so that the grant is refused when it does.

    At most `MAX_REVOKED_FENCES` are remembered; the oldest goes first, its grant being long overdue.
    """

    def __init__(self) -> None:
        self._fences: OrderedDict[tuple[Peer, int], None] = OrderedDict()

    def remember(self, peer: Peer, fence: int) -> None:
        """`peer` revoked `fence`."""
        self._fences[peer, fence] = None
        if len(self._fences) > MAX_REVOKED_FENCES:
            self._fences.popitem(last=False)

    def take(self, peer: Peer, fence: int) -> bool:
        """Whether `fence` was revoked. Forgets it: a grant comes once."""
        if (peer, fence) not in self._fences:
            return False
        del self._fences[peer, fence]
        return True

    def forget(self, peer: Peer) -> None:
        """That process is gone, and its grants with it."""
        for key in [key for key in self._fences if key[0] == peer]:
            del self._fences[key]


@dataclass(slots=True, eq=False)
class Handoff:
    """A job here. The first `num_pushed` blocks of its prompt need no push (any more).

    `ending` means that the job is over here and only waits for its blocks to be free of readers and writers;
    then `farewell` goes to the coordinator, if there is one, and `num_acks_owed` times a RevokeAck to decode. `seal` is
    what decode has to answer, since `num_rounds_sealed` rounds of renewals.
    """

    prompt: Prompt
    state: HandoffState = HandoffState.WAITING
    grant: PushTo | None = None
    num_pushed: int = 0
    first_token: int | None = None
    ending: bool = False
    farewell: Dropped | None = None
    seal: Seal | None = None
    num_rounds_sealed: int = 0
    num_acks_owed: int = 0
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.prompt.key

    @property
    def peer(self) -> Peer | None:
        """The process that granted room, if one has."""
        return (self.grant.decode_worker, self.grant.decode_incarnation) if self.grant else None

    @property
    def is_parked(self) -> bool:
        """Whether the KV is computed and nobody has granted room for it."""
        return self.state is HandoffState.WAITING and self.first_token is not None

    @property
    def awaits_seal(self) -> bool:
        """Whether decode's lease must be renewed: granted, and the Seal is still to come."""
        return self.state in (HandoffState.PUSHING, HandoffState.FINISHING) and not self.ending

    def move(self, state: HandoffState) -> None:
        """Goes to `state`.

        Raises:
            InvariantViolation: the table has no such move.
        """
        if state not in _MOVES[self.state]:
            raise InvariantViolation(f"{self.key} cannot go from {self.state} to {state}")
        self.state = state

    def accept(self, grant: PushTo) -> None:
        """Attaches the grant; blocks may be pushed from now on."""
        self.move(HandoffState.PUSHING)
        self.grant = grant
        self.num_pushed = grant.num_cached_blocks

    def take_push(self, num_tokens: int, block_size: int) -> BlockPush | None:
        """The blocks that are due once `num_tokens` tokens of the prompt are in KV, and were not given yet.

        Full ones are, and the last one when the prompt ends in it. None if there are none, or no grant.
        """
        if self.state is not HandoffState.PUSHING or self.grant is None or self.prompt.table is None:
            return None
        first, last = self.num_pushed, num_tokens // block_size
        if num_tokens == self.prompt.num_tokens:
            last = len(self.grant.block_ids)
        if first >= last:
            return None
        self.num_pushed = last
        source = self.prompt.table.block_ids[first:last]
        return BlockPush(self.grant.fence, self.grant.decode_worker, source, self.grant.block_ids[first:last])

    def sent_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Of a table's blocks, those that decode did not hold already."""
        return tuple(block_ids[self.grant.num_cached_blocks :]) if self.grant else ()

    def acks_owed(self) -> list[SendPeer]:
        """What decode hears, for each time that it has revoked the grant, once nothing is written under it any more."""
        if self.grant is None or self.peer is None:
            return []
        return [SendPeer(*self.peer, RevokeAck(self.key, self.grant.fence))] * self.num_acks_owed

    def manifest(self, fingerprint: str, layout: KVLayout, finished: PushFinished | None) -> Manifest:
        """What was sent under the grant; `finished` is None if decode had every block.

        Raises:
            InvariantViolation: nothing was granted or computed yet.
        """
        if self.grant is None or self.first_token is None:
            raise InvariantViolation(f"{self.key} was sealed before it was granted and computed")
        return Manifest(
            key=self.key,
            fence=self.grant.fence,
            fingerprint=fingerprint,
            layout=layout,
            num_tokens=self.prompt.num_tokens,
            block_ids=self.sent_blocks(self.grant.block_ids),
            digests=finished.digests if finished else (),
            first_token=self.first_token,
            num_bytes=finished.num_bytes if finished else 0,
            transfer_s=finished.transfer_s if finished else 0.0,
        )


def renewals(granted: Iterable[Handoff]) -> list[SendPeer]:
    """One round of what keeps decode's leases alive: a Renew to each process with the fences whose Seal is to come, and
    each Seal again that was not answered for a lease, which is `RENEWALS_PER_LEASE` rounds."""
    commands: list[SendPeer] = []
    fences: dict[Peer, list[int]] = {}
    for job in granted:
        if job.awaits_seal and job.grant and job.peer:
            fences.setdefault(job.peer, []).append(job.grant.fence)
        elif job.state is HandoffState.SEALED and job.seal and job.peer:
            job.num_rounds_sealed += 1
            if job.num_rounds_sealed % RENEWALS_PER_LEASE == 0:
                commands.append(SendPeer(*job.peer, job.seal))
    return commands + [SendPeer(*peer, Renew(tuple(held))) for peer, held in fences.items()]
