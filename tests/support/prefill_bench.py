"""A prefill core that is linked to one decode worker, spoken to without a shell."""

from __future__ import annotations

from support.core_bench import LAYOUT, CoreBench
from twinpool.config import SchedulerConfig
from twinpool.messages import (
    Prefill,
    PushTo,
)
from twinpool.prefill_pool.core import PrefillCore
from twinpool.request import Job
from twinpool.worker.core import (
    Command,
)

DECODE = ("decode-0", "life-1")


class Bench(CoreBench[PrefillCore]):
    """A prefill core that is linked to one decode worker."""

    def __init__(self, num_blocks: int = 20, **settings: float) -> None:
        config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        super().__init__(PrefillCore(num_blocks, LAYOUT, "model", config), DECODE)

    def start(self, work: Job) -> None:
        assert self.tell(Prefill(work, "decode-0")) == []

    def grant(self, work: Job, fence: int = 9, num_cached: int = 0) -> list[Command]:
        num_blocks = self.core.pool.blocks_for(len(work.token_ids))
        return self.tell(PushTo(work.key, *DECODE, fence, tuple(range(100, 100 + num_blocks)), num_cached))

    @property
    def num_held(self) -> int:
        return self.core.pool.num_owned
