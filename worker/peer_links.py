"""A worker's links to those of the other pool, from the side that its role has of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from twinpool.config import Role
from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import KVSender
from twinpool.messages import LinkFailed, LinkReady, Message, PeerInfo
from twinpool.metrics import Counters, WorkerMetric
from twinpool.worker.core import Event, FromPeer, LinkLost, PeerGone, PeerLinked
from twinpool.worker.incoming import IncomingLinks
from twinpool.worker.links import OnJunk, Spawn
from twinpool.worker.outgoing import OutgoingLinks
from twinpool.worker.parts import WorkerParts

log = logging.getLogger(__name__)


class PeerLinks:
    """`incoming` links of a decode worker, outgoing ones of a prefill worker, none of a colocated one.

    `emit` takes the core's events; `report` what the coordinator is told of outgoing links. `senders` is the live map
    from a decode worker's id to what pushes to it, `endpoint` where prefill workers connect; both are empty where the
    role has no such links.
    """

    def __init__(
        self,
        parts: WorkerParts,
        emit: Callable[[Event], None],
        report: Callable[[LinkReady | LinkFailed], None],
        on_junk: OnJunk,
        spawn: Spawn,
    ) -> None:
        self._emit = emit
        self._peers: dict[tuple[str, str], PeerInfo] = {}
        self._counted: Counter[WorkerMetric] = Counter()
        self._outgoing: OutgoingLinks | None = None
        self.incoming: IncomingLinks | None = None
        self.senders: Mapping[str, KVSender] = {}
        self.endpoint = ""
        match parts.register.role:
            case Role.DECODE:
                self.incoming = IncomingLinks(
                    parts.peer_bind, parts.pool, parts.settings, self._linked, self._heard, on_junk, spawn
                )
                self.endpoint = self.incoming.endpoint
            case Role.PREFILL:
                self._outgoing = OutgoingLinks(parts.pool, parts.settings, emit, report, on_junk, spawn)
                self.senders = self._outgoing.senders

    @property
    def _links(self) -> IncomingLinks | OutgoingLinks | None:
        return self.incoming or self._outgoing

    def update(self, peers: tuple[PeerInfo, ...]) -> None:
        """These are all live workers of the other pool: drops the links to others, adds those that are missing."""
        current = {(peer.worker_id, peer.incarnation): peer for peer in peers}
        gone = [peer for name, peer in self._peers.items() if name not in current]
        new = [peer for name, peer in current.items() if name not in self._peers]
        self._peers = current
        for peer in gone:
            if self._outgoing is not None:
                self._outgoing.drop(peer)
            if self.incoming is None or self.incoming.drop(peer):
                self._emit(PeerGone(peer.worker_id, peer.incarnation))
            else:
                self._emit(LinkLost(peer.worker_id, peer.incarnation))
        if (links := self._links) is not None:
            for peer in new:
                links.add(peer)

    def send(self, worker_id: str, incarnation: str, message: Message) -> None:
        """Queues a message for a peer. One that is gone is not told: its end is an event of its own."""
        try:
            if (links := self._links) is not None:
                links.send(worker_id, incarnation, message)
        except PeerLost as exc:
            log.info("%s not told to %s: %s", type(message).__name__, worker_id, exc)

    def notice_deaths(self) -> None:
        """Emits PeerGone for each lost writer that has died since the last call."""
        if self.incoming is not None:
            for worker_id, incarnation in self.incoming.departed():
                self._emit(PeerGone(worker_id, incarnation))

    def notice_losses(self) -> None:
        """A push has failed; see `OutgoingLinks.notice_losses`."""
        if self._outgoing is not None:
            self._outgoing.notice_losses()

    def count_into(self, counters: Counters) -> None:
        """Adds what the receivers have counted, on threads of their own, since the last call."""
        if self.incoming is not None:
            now = Counter(
                {
                    WorkerMetric.STALE_FENCES: self.incoming.num_dropped,
                    WorkerMetric.JUNK_MESSAGES: self.incoming.num_junk,
                }
            )
            for metric, count in now.items():
                counters.add(metric, count - self._counted[metric])
            self._counted = now

    async def close(self) -> None:
        """Releases sockets and transports. The owner has cancelled the tasks that it spawned for this."""
        if (links := self._links) is not None:
            await links.close()

    def _linked(self, worker_id: str, incarnation: str, transport: str) -> None:
        self._emit(PeerLinked(worker_id, incarnation, transport))

    def _heard(self, worker_id: str, incarnation: str, message: Message) -> None:
        self._emit(FromPeer(worker_id, incarnation, message))
