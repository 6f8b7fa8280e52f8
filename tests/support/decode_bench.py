"""A decode core with one linked prefill worker, spoken to without a shell."""

from __future__ import annotations

from support.jobs import messages
from twinpool.config import SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import (
    Granted,
    Manifest,
    Message,
    Reserve,
    Revoke,
    RevokeAck,
    Seal,
)
from twinpool.request import Job
from twinpool.worker.core import (
    CancelReceive,
    Command,
    FromCoordinator,
    FromPeer,
    PeerLinked,
    ReceiveCancelled,
    StepPlan,
    Verified,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype=Dtype.FLOAT32)
PREFILL = ("prefill-0", "life-1")


class Bench:
    """A decode core with one linked prefill worker."""

    def __init__(self, num_blocks: int = 20, strict: bool = False, **settings: float) -> None:
        self.num_blocks = num_blocks
        config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        self.core = DecodeCore(num_blocks, LAYOUT, "model", config, "life-1", strict)
        self.now = 0.0
        self.handle(PeerLinked(*PREFILL, "memory"))

    def handle(self, event: object) -> list[Command]:
        commands = self.core.handle(event, self.now)  # type: ignore[arg-type]
        self.core.check()
        return commands

    def tell(self, message: Message) -> list[Command]:
        return self.handle(FromCoordinator(message))

    def hear(self, message: Message) -> list[Command]:
        return self.handle(FromPeer(*PREFILL, message))

    def reserve(self, work: Job) -> Granted:
        """Reserves room that is there."""
        (granted,) = messages(self.tell(Reserve(work, *PREFILL)))
        assert isinstance(granted, Granted)
        return granted

    def seal(self, work: Job, granted: Granted, first_token: int = 50) -> list[Command]:
        return self.hear(Seal(manifest_of(work, granted, first_token)))

    def join(self, work: Job) -> Granted:
        """Everything from Reserve to the place in the batch."""
        granted = self.reserve(work)
        self.seal(work, granted)
        self.handle(Verified(granted.fence, 0.0))
        return granted

    def revoked(self, fence: int, commands: list[Command]) -> list[object]:
        """Answers a revocation from both sides; returns the messages that went out before."""
        assert CancelReceive(fence) in commands
        self.handle(ReceiveCancelled(fence))
        key = next(m.key for m in messages(commands) if isinstance(m, Revoke))
        self.hear(RevokeAck(key, fence))
        return messages(commands)

    def plan(self) -> StepPlan:
        plan = self.core.next_step(self.now)
        self.core.check()
        assert plan is not None
        return plan

    def assert_empty(self) -> None:
        """Nothing is held any more, and nothing is to be done."""
        stats = self.core.stats()
        assert stats.free_blocks + stats.cached_blocks == self.num_blocks
        assert stats.waiting == stats.running == stats.leased_blocks == stats.quarantined_blocks == 0
        assert self.core.next_step(self.now) is None


def manifest_of(work: Job, granted: Granted, first_token: int = 50) -> Manifest:
    sent = granted.block_ids[granted.num_cached_blocks :]
    return Manifest(
        key=work.key,
        fence=granted.fence,
        fingerprint="model",
        layout=LAYOUT,
        num_tokens=len(work.token_ids),
        block_ids=sent,
        digests=tuple(range(len(sent))),
        first_token=first_token,
        num_bytes=100 * len(sent),
        transfer_s=0.25,
    )
