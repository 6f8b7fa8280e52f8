"""A worker's core, of whichever role, spoken to without a shell."""

from __future__ import annotations

from typing import Generic, TypeVar

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.colocated_pool.hybrid import HybridCore
from twinpool.decode_pool.core import DecodeCore
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Message
from twinpool.prefill_pool.core import PrefillCore
from twinpool.worker.core import Command, Event, FromCoordinator, FromPeer, PeerLinked, StepPlan

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype=Dtype.FLOAT32)

Core = TypeVar("Core", bound=PrefillCore | DecodeCore | ColocatedCore | HybridCore)


class CoreBench(Generic[Core]):
    """The core has a link to `peer` (worker id and incarnation), if its role has any. Time stands still at `now`. The
    core's books are checked after all that it is told and asked."""

    def __init__(self, core: Core, peer: tuple[str, str] | None = None) -> None:
        self.core = core
        self.now = 0.0
        self._peer = peer
        if peer is not None:
            self.handle(PeerLinked(*peer, "memory"))

    def handle(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, self.now)
        self.core.check()
        return commands

    def tell(self, message: Message) -> list[Command]:
        """The coordinator says something."""
        return self.handle(FromCoordinator(message))

    def hear(self, message: Message) -> list[Command]:
        """The linked worker says something."""
        assert self._peer is not None, "a core without links"
        return self.handle(FromPeer(*self._peer, message))

    def plan(self) -> StepPlan:
        """The next step, which there is."""
        plan = self.core.next_step(self.now)
        self.core.check()
        assert plan is not None
        return plan

    def assert_empty(self) -> None:
        """Nothing is held any more, and nothing is to be done."""
        stats = self.core.stats()
        assert stats.free_blocks + stats.cached_blocks == self.core.pool.num_blocks
        assert stats.waiting == stats.running == stats.leased_blocks == stats.quarantined_blocks == 0
        assert self.core.next_step(self.now) is None
