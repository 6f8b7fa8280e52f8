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
class Layout:
    """One layout. `token_budget` None: the roles' own; 0: prompts are computed whole."""

    name: str
    roles: tuple[Role, ...]
    token_budget: int | None

    def threads(self, num_cores: int) -> int:
        """Of each worker, as a server shares the cores: its profile is of so many."""
        return max(1, num_cores // len(self.roles))

    def arm(self, max_model_len: int) -> Arm:
        """The server. `max_model_len` is the chunk of one that computes prompts whole."""
        names = {"1P1D": "1p1d", "colocated chunked": f"colocated-chunked-{CHUNK}"}
        return parse_arm(names.get(self.name, "colocated-whole"), max_model_len)

    def deployment(self, times: ServiceTimes, kv: KVLayout, max_model_len: int) -> Deployment:
        """What is simulated: all workers on one machine."""
        num_blocks = KV_TOKENS // BLOCK_SIZE // len(self.roles)
        budget = max_model_len if self.token_budget == 0 else self.token_budget
        pools = tuple(
            Pool(
                role, 1, times, num_blocks, SchedulerConfig(token_budget=budget),
                machine=MACHINE,
            )
            for role in self.roles
        )  # fmt: skip
        return Deployment(pools, kv, max_model_len)


LAYOUTS = (
    Layout("1P1D", (Role.PREFILL, Role.DECODE), None),
    Layout("colocated chunked", (Role.COLOCATED,), CHUNK),
    Layout("colocated whole", (Role.COLOCATED,), 0),
)
