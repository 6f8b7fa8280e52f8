"""A prefill core that is linked to one decode worker, spoken to without a shell."""

from __future__ import annotations

from twinpool.config import SchedulerConfig
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import (
    Message,
    Prefill,
    PushTo,
)
from twinpool.prefill_pool.core import PrefillCore
from twinpool.request import Job
from twinpool.worker.core import (
    Command,
    FromCoordinator,
    FromPeer,
    PeerLinked,
    StepPlan,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype=Dtype.FLOAT32)
DECODE = ("decode-0", "life-1")


class Bench:
    """A prefill core that is linked to one decode worker."""

    def __init__(self, num_blocks: int = 20, **settings: float) -> None:
        self.num_blocks = num_blocks
        self.core = PrefillCore(num_blocks, LAYOUT, "model", SchedulerConfig(**settings))  # type: ignore[arg-type]
        self.now = 0.0
        self.handle(PeerLinked(*DECODE, "memory"))

    def handle(self, event: object) -> list[Command]:
        commands = self.core.handle(event, self.now)  # type: ignore[arg-type]
        self.core.check()
        return commands

    def tell(self, message: Message) -> list[Command]:
        return self.handle(FromCoordinator(message))

    def hear(self, message: Message) -> list[Command]:
        return self.handle(FromPeer(*DECODE, message))

    def plan(self) -> StepPlan:
        plan = self.core.next_step(self.now)
        self.core.check()
        assert plan is not None
        return plan

    def start(self, work: Job) -> None:
        assert self.tell(Prefill(work, "decode-0")) == []

    def grant(self, work: Job, fence: int = 9, num_cached: int = 0) -> list[Command]:
        num_blocks = self.core.pool.blocks_for(len(work.token_ids))
        return self.tell(PushTo(work.key, *DECODE, fence, tuple(range(100, 100 + num_blocks)), num_cached))

    @property
    def num_held(self) -> int:
        return self.core.pool.num_owned

    def assert_empty(self) -> None:
        """Nothing is held any more, and nothing is to be done."""
        stats = self.core.stats()
        assert stats.free_blocks + stats.cached_blocks == self.num_blocks
        assert stats.waiting == stats.running == stats.leased_blocks == 0
        assert self.core.next_step(self.now) is None
