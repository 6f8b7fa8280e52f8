"""A decode core with one linked prefill worker, spoken to without a shell."""

from __future__ import annotations

from support.core_bench import LAYOUT, CoreBench
from support.jobs import messages
from twinpool.config import SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.messages import (
    Granted,
    Manifest,
    Reserve,
    Revoke,
    RevokeAck,
    Seal,
)
from twinpool.request import Job
from twinpool.worker.core import (
    CancelReceive,
    Command,
    ReceiveCancelled,
    Verified,
)

PREFILL = ("prefill-0", "life-1")


class Bench(CoreBench[DecodeCore]):
    """A decode core with one linked prefill worker."""

    def __init__(self, num_blocks: int = 20, strict: bool = False, **settings: float) -> None:
        config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        super().__init__(DecodeCore(num_blocks, LAYOUT, "model", config, "life-1", strict), PREFILL)

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
