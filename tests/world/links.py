"""A worker's links in the world: handshakes that take time, fail, break and are opened again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.config import Role
from twinpool.messages import LinkFailed, LinkReady
from twinpool.worker.core import BlockPush, LinkLost
from world.wire import Wire

if TYPE_CHECKING:
    from world.worker import Identity, WorkerProcess
    from world.world import World

REOPEN_S = 0.3
LOOK_S = 0.2
"""Within so long a lost link is noticed, if no push fails before."""


class Links:
    """The peers of one worker. On a prefill worker `senders` maps a decode worker's id to the wire that works."""

    def __init__(self, world: World, owner: WorkerProcess) -> None:
        self._world = world
        self._owner = owner
        self._peers: dict[Identity, None] = {}
        self._writers: set[Identity] = set()
        self._undead: dict[Identity, None] = {}
        self.senders: dict[str, Wire] = {}

    @property
    def is_busy(self) -> bool:
        """Whether bytes are under way to a peer."""
        return any(wire.is_busy for wire in self.senders.values())

    def is_writer(self, peer: Identity) -> bool:
        """Whether KV comes from that process."""
        return peer in self._writers

    def hears(self, peer: Identity) -> bool:
        """Whether that process is known: a decode worker hears whoever shook hands, a prefill worker its peers."""
        return peer in (self._writers if self._owner.role is Role.DECODE else self._peers)

    def may_write(self, peer: Identity) -> bool:
        """Whether that process, which counts as lost, may still write into this one's blocks."""
        return peer in self._undead

    def departed(self) -> list[Identity]:
        """Those that counted as lost, could write, and have died since the last time."""
        over = [peer for peer in self._undead if peer not in self._world.workers]
        for peer in over:
            del self._undead[peer]
        return over

    def replace(self, peers: list[Identity]) -> tuple[list[Identity], list[Identity]]:
        """The peers are these now; returns those that are gone, to which everything is closed, and the new ones."""
        gone = [peer for peer in self._peers if peer not in peers]
        new = [peer for peer in peers if peer not in self._peers]
        self._peers = dict.fromkeys(peers)
        for peer in gone:
            if peer in self._writers and self._world.scenario.is_one_sided and peer in self._world.workers:
                self._undead[peer] = None
            self._writers.discard(peer)
            wire = self.senders.get(peer[0])
            if wire is not None and wire.peer.identity == peer:
                wire.break_off(f"{peer[0]} is gone")
                del self.senders[peer[0]]
        return gone, new

    # ── opening ─────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, peer: Identity) -> None:
        """A prefill worker keeps a link to that decode worker."""
        if self._owner.role is Role.PREFILL:
            self._owner.schedule.after(
                self._owner.random.uniform(0.001, 0.02), self._owner, lambda: self._hello(peer)
            )

    def _hello(self, peer: Identity) -> None:
        if peer not in self._peers:
            return
        other = self._world.workers.get(peer)
        if other is None or not self._world.network.reaches(self._owner.identity, peer):
            self._report_failure(peer)
            self._owner.schedule.after(REOPEN_S, self._owner, lambda: self._hello(peer))
            return
        other.later(lambda: self._be_probed(other))

    def _be_probed(self, other: WorkerProcess) -> None:
        other.links._writers.add(self._owner.identity)
        other.linked(self._owner.identity)
        self._owner.later(lambda: self._opened(other))

    def _opened(self, other: WorkerProcess) -> None:
        peer = other.identity
        if peer not in self._peers:
            return
        if not other.is_alive:
            self._hello(peer)
            return
        wire = self.senders[peer[0]] = Wire(self._owner, other, self._world.scenario.is_one_sided)
        wire.slowness = self._world.scenario.wire_slowness
        self._owner.linked(peer)
        self._world.network.to_coordinator(self._owner, LinkReady(*peer, "memory", 1.0, 1))

    # ── pushing ─────────────────────────────────────────────────────────────────────────────────────────────

    def push(self, push: BlockPush, wire: Wire | None) -> bool:
        """Pushes over the wire that was looked up when the push was asked for; False if that is lost."""
        return wire is not None and wire.push(push)

    def notice_losses(self) -> None:
        """Reports what is lost, before anybody hears of the requests that it cost."""
        for worker_id, wire in list(self.senders.items()):
            if wire.lost:
                del self.senders[worker_id]
                self._report_failure(wire.peer.identity)
                self._owner.handle(LinkLost(*wire.peer.identity))
                self._owner.schedule.after(
                    REOPEN_S, self._owner, lambda peer=wire.peer.identity: self._hello(peer)
                )

    def broke(self, peer: Identity) -> None:
        """The wire to that process broke: it is noticed in a moment."""
        wire = self.senders.get(peer[0])
        if wire is not None and wire.peer.identity == peer and not wire.lost:
            wire.break_off("broken")
            self._owner.schedule.after(self._owner.random.uniform(0, LOOK_S), self._owner, self.notice_losses)

    def _report_failure(self, peer: Identity) -> None:
        self._world.network.to_coordinator(self._owner, LinkFailed(*peer, "broken"))
