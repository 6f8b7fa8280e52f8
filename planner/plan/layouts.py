"""Layouts that a plan chooses among, and the deployments that they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.errors import ConfigError
from twinpool.layout import KVLayout
from twinpool.planner.deployment import Deployment, Pool
from twinpool.planner.plan.capacity import KvCapacity
from twinpool.planner.times.roofline import Roofline
from twinpool.planner.times.service_times import ServiceTimes


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """`prefill` and `decode` workers, or `colocated` ones, whose steps have `token_budget` tokens at most. `prefill_tp`
    and `decode_tp` accelerators make one worker; colocated ones have `decode_tp`."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    prefill_tp: int = 1
    decode_tp: int = 1
    token_budget: int = 0

    @property
    def is_split(self) -> bool:
        """Whether prompts and answers have pools of their own."""
        return not self.colocated

    @property
    def num_accelerators(self) -> int:
        """All that its workers have."""
        return self.prefill * self.prefill_tp + (self.decode + self.colocated) * self.decode_tp

    @property
    def name(self) -> str:
        """Like 3P5D, 2P(TP2)4D, or 8 colocated (512)."""
        if self.is_split:
            return f"{self.prefill}P{_degree(self.prefill_tp)}{self.decode}D{_degree(self.decode_tp)}"
        degree = f" TP{self.decode_tp}" if self.decode_tp > 1 else ""
        return f"{self.colocated} colocated{degree} ({self.token_budget:,})"

    def changed(self, *, prefill: int = 0, decode: int = 0, colocated: int = 0) -> Layout | None:
        """With so many workers more of each role; None if that leaves a role without one."""
        found = replace(
            self,
            prefill=self.prefill + prefill,
            decode=self.decode + decode,
            colocated=self.colocated + colocated,
        )
        least = min(found.prefill, found.decode) if self.is_split else found.colocated
        return found if least >= 1 else None


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A worker of some TP degree: its service times, the KV beside its weights, and the roofline that nothing on its
    hardware is above (None: its data sheet is not known)."""

    times: ServiceTimes
    capacity: KvCapacity
    floor: Roofline | None = None

    @property
    def moves_kv(self) -> bool:
        """Whether its times say how long KV takes; a profile of one worker alone does not."""
        try:
            self.times.transfer_s(1)
        except ConfigError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class LayoutSpace:
    """All layouts of some hardware: a kind of worker for each TP degree, and the settings that all of them share.

    `token_budgets` are those that colocated workers may have. `machine`: see `Pool`. Without `can_split` nobody knows
    how long KV takes from one worker to another. Where `decode` is hybrid, the workers of both pools of a split are.
    """

    kinds: Mapping[int, WorkerKind]
    kv: KVLayout
    max_model_len: int
    prefill: SchedulerConfig
    decode: SchedulerConfig
    token_budgets: tuple[int, ...]
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    machine: str | None = None
    can_split: bool = True

    def deployment(self, layout: Layout) -> Deployment:
        """What the simulator gets."""
        if layout.is_split:
            pools: tuple[Pool, ...] = (
                self._pool(Role.PREFILL, layout.prefill, layout.prefill_tp, self.prefill),
                self._pool(Role.DECODE, layout.decode, layout.decode_tp, self.decode),
            )
        else:
            scheduler = replace(self.decode, token_budget=layout.token_budget, hybrid=False)
            pools = (self._pool(Role.COLOCATED, layout.colocated, layout.decode_tp, scheduler),)
        return Deployment(pools, self.kv, self.max_model_len, self.coordinator)

    def _pool(self, role: Role, count: int, degree: int, scheduler: SchedulerConfig) -> Pool:
        kind = self.kinds[degree]
        return Pool(role, count, kind.times, kind.capacity.num_blocks, scheduler, degree, self.machine)

    def with_more_kv(self, factor: float) -> LayoutSpace:
        """With so many times the blocks for decode and colocated workers (and for prefill, which they do not bind)."""
        kinds = {
            degree: replace(
                kind, capacity=replace(kind.capacity, num_blocks=int(kind.capacity.num_blocks * factor))
            )
            for degree, kind in self.kinds.items()
        }
        return replace(self, kinds=kinds)

    def splits(self, num_accelerators: int) -> Iterator[Layout]:
        """All that have exactly so many accelerators, every pair of TP degrees."""
        degrees = sorted(self.kinds) if self.can_split else []
        for prefill_tp in degrees:
            for decode_tp in degrees:
                for prefill in range(1, num_accelerators // prefill_tp + 1):
                    decode, rest = divmod(num_accelerators - prefill * prefill_tp, decode_tp)
                    if decode >= 1 and not rest:
                        yield Layout(prefill, decode, 0, prefill_tp, decode_tp)

    def colocated(self, num_accelerators: int) -> Iterator[Layout]:
        """All that have exactly so many accelerators, of every TP degree and token budget."""
        for degree in sorted(self.kinds):
            if num_accelerators % degree == 0:
                for budget in self.token_budgets:
                    yield Layout(0, 0, num_accelerators // degree, 1, degree, budget)


def accelerators(count: int) -> str:
    """So many, in words."""
    return "1 accelerator" if count == 1 else f"{count} accelerators"


def _degree(degree: int) -> str:
    return f"(TP{degree})" if degree > 1 else ""
