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

    @property
    def degree(self) -> str:
        """How a layout's name tells that a worker has several accelerators; empty if it has one."""
        return f"(TP{self.num_accelerators})" if self.num_accelerators > 1 else ""


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
        """As people write it: 2P3D, 2P(TP2)4D(TP4), 4 colocated(TP2)."""
        by_role = {pool.role: pool for pool in self.pools}
        if (both := by_role.get(Role.COLOCATED)) is not None:
            return f"{both.num_workers} colocated{both.degree}"
        prefill, decode = by_role[Role.PREFILL], by_role[Role.DECODE]
        return f"{prefill.num_workers}P{prefill.degree}{decode.num_workers}D{decode.degree}"

    @property
    def num_accelerators(self) -> int:
        """All that the workers have."""
        return sum(pool.num_workers * pool.num_accelerators for pool in self.pools)
