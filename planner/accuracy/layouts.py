"""The layouts that predictions are tried on, as servers and as what is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.bench.comparison.arms import Arm, parse_arm
from twinpool.config import Role, SchedulerConfig
from twinpool.layout import KVLayout
from twinpool.planner.deployment import Deployment, Pool
from twinpool.planner.times.service_times import ServiceTimes

KV_TOKENS, BLOCK_SIZE = 65_536, 16
"""Of all workers of a layout together."""
CHUNK = 128
"""Of the chunked colocated worker, in tokens: the default."""
MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """One layout. `chunk` of prompts, in tokens; None: as the roles have it, or whole prompts if `is_whole`. Its loads
    are sent `times_as_often` as others'."""

    name: str
    roles: tuple[Role, ...]
    arm_name: str
    chunk: int | None = None
    is_whole: bool = False
    times_as_often: int = 1

    def repetitions(self, of_others: int) -> int:
        """Of each of its loads, where those of others have so many."""
        return self.times_as_often * of_others

    def threads(self, num_cores: int) -> int:
        """Of each worker, as a server shares the cores: its profile is of so many."""
        return max(1, num_cores // len(self.roles))

    def arm(self, max_model_len: int) -> Arm:
        """The server. `max_model_len` is the chunk of one that computes prompts whole."""
        return parse_arm(self.arm_name, max_model_len)

    def deployment(self, times: ServiceTimes, kv: KVLayout, max_model_len: int) -> Deployment:
        """What is simulated: all workers on one machine."""
        num_blocks = KV_TOKENS // BLOCK_SIZE // len(self.roles)
        budget = max_model_len if self.is_whole else self.chunk
        pools = tuple(
            Pool(
                role, 1, times, num_blocks, SchedulerConfig(token_budget=budget),
                machine=MACHINE,
            )
            for role in self.roles
        )  # fmt: skip
        return Deployment(pools, kv, max_model_len)


LAYOUTS = (
    TriedLayout("1P1D", (Role.PREFILL, Role.DECODE), "1p1d", times_as_often=2),
    TriedLayout("colocated chunked", (Role.COLOCATED,), f"colocated-chunked-{CHUNK}", chunk=CHUNK),
    TriedLayout("colocated whole", (Role.COLOCATED,), "colocated-whole", is_whole=True, times_as_often=2),
)
"""Runs of 1P1D, whose two workers share what the machine gives, and the longest gaps beside whole prompts differ twice
as much as what chunks do."""
