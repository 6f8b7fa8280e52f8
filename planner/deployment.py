"""What is simulated: workers of each role, what each has, and the settings that the cores get."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.errors import ConfigError
from twinpool.layout import KVLayout
from twinpool.planner.times.service_times import ServiceTimes


@dataclass(frozen=True, slots=True)
class Pool:
    """`num_workers` workers of one role, alike: times of a step, KV blocks and accelerators (its TP degree) of each.

    `machine` names what its workers share: those of one name slow each other down (see
    `ServiceTimes.step_s`). None: each has its own.
    """

    role: Role
    num_workers: int
    times: ServiceTimes
    num_blocks: int
    scheduler: SchedulerConfig
    num_accelerators: int = 1
    machine: str | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """Pools that serve together: one of prefill and one of decode workers, or one of colocated workers."""

    pools: tuple[Pool, ...]
    layout: KVLayout
    max_model_len: int
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)

    def __post_init__(self) -> None:
        roles = sorted(pool.role.value for pool in self.pools)
        if roles not in (["colocated"], ["decode", "prefill"]):
            raise ConfigError(
                f"pools are {', '.join(roles) or 'none'}; allowed: prefill and decode, or colocated"
            )

    @property
    def name(self) -> str:
        """As people write it: 2P3D, 4 colocated."""
        counts = {pool.role: pool.num_workers for pool in self.pools}
        if Role.COLOCATED in counts:
            return f"{counts[Role.COLOCATED]} colocated"
        return f"{counts[Role.PREFILL]}P{counts[Role.DECODE]}D"

    @property
    def num_accelerators(self) -> int:
        """All that the workers have."""
        return sum(pool.num_workers * pool.num_accelerators for pool in self.pools)
