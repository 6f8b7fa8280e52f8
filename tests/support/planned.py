"""Spaces of layouts with simple service times, traffic, and a stand-in for the simulator whose capacities are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinpool.bench.serving.datasets.shapes import Shape, own
from twinpool.bench.serving.slo import Slo
from twinpool.config import Role, SchedulerConfig
from twinpool.layout import Dtype, KVLayout
from twinpool.planner.deployment import Deployment
from twinpool.planner.plan.capacity import KvCapacity
from twinpool.planner.plan.experiments import Seen, measured
from twinpool.planner.plan.layouts import LayoutSpace, WorkerKind
from twinpool.planner.plan.study import Question
from twinpool.planner.plan.traffic import Traffic, traffic_of
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads

KV = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype=Dtype.BFLOAT16)
SLO = Slo(ttft_s=1.0, itl_p99_s=0.05)


@dataclass(frozen=True, slots=True)
class Affine:
    """A step takes `fixed_s`, and so much for each prompt token, sequence and token of context."""

    fixed_s: float = 0.005
    prompt_token_s: float = 1e-4
    sequence_s: float = 1e-4
    context_token_s: float = 0.0
    link_bytes_per_s: float = 1e12
    name: str = "affine"
    overheads: Overheads = field(default_factory=Overheads)

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:  # noqa: ARG002
        return (
            self.fixed_s
            + self.prompt_token_s * shape.prompt_tokens
            + self.sequence_s * shape.num_sequences
            + self.context_token_s * shape.context_tokens
        )

    def transfer_s(self, num_bytes: int) -> float:
        return num_bytes / self.link_bytes_per_s


def kv(num_blocks: int, degree: int = 1) -> KvCapacity:
    return KvCapacity(KV, degree, num_blocks * KV.block_bytes, 0, num_blocks * KV.block_bytes, num_blocks)


def space(times: Affine | None = None, num_blocks: int = 4000, degrees: Sequence[int] = (1,)) -> LayoutSpace:
    kinds = {degree: WorkerKind(times or Affine(), kv(num_blocks, degree)) for degree in degrees}
    return LayoutSpace(
        kinds=kinds,
        kv=KV,
        max_model_len=4096,
        prefill=SchedulerConfig(token_budget=2048),
        decode=SchedulerConfig(max_num_seqs=128),
        token_budgets=(256, 1024),
    )


def requests(count: int = 400, input_tokens: int = 1000, output_tokens: int = 101) -> list[Shape]:
    return [Shape((own(index, input_tokens),), output_tokens) for index in range(count)]


def traffic(rate: float | None = None, **lengths: int) -> Traffic:
    return traffic_of(requests(**lengths), rate)


def question(rate: float | None = None, slo: Slo = SLO, **changes: object) -> Question:
    return Question(traffic(rate), slo, **changes)  # type: ignore[arg-type]


Capacities = Callable[[Deployment], float]


@dataclass(slots=True)
class Pretended:
    """Stands in for the simulator: of a deployment with capacity c, enough requests are good at rates up to c, and
    fewer the further a rate is above it. The others wait too long. Each stretch of the trace changes c by up to
    `spread`."""

    capacity_of: Capacities
    spread: float = 0.0
    apart: bool = False
    """Split and colocated layouts have other luck with a stretch, not the same."""
    num_runs: int = 0
    stops_after: int | None = None

    def __call__(self, deployment: Deployment, shapes: Sequence[Shape]) -> Seen:
        if self.stops_after is not None and self.num_runs >= self.stops_after:
            raise KeyboardInterrupt
        self.num_runs += 1
        rate = len(shapes) / (shapes[-1].at_s or 1.0)
        kind = len(deployment.pools) if self.apart else 0
        luck = np.random.default_rng((*shapes[0].pieces[0].key, kind)).uniform(-1, 1)
        capacity = self.capacity_of(deployment) * (1 + self.spread * luck)
        count = len(shapes[measured(len(shapes))])
        num_good = round(count * min(1.0, 0.9 * capacity / rate))
        ttft = np.where(np.arange(count) < num_good, 0.1, 100.0)
        return Seen(ttft, np.full(count, 0.01), np.full(count, 0.02), np.full(count, 1.0))


def pool_sizes(deployment: Deployment) -> tuple[int, int, int]:
    """Prefill, decode and colocated workers."""
    counts = {pool.role: pool.num_workers for pool in deployment.pools}
    return counts.get(Role.PREFILL, 0), counts.get(Role.DECODE, 0), counts.get(Role.COLOCATED, 0)


def bottleneck(prefill: float, decode: float, colocated: float, kv_matters: bool = False) -> Capacities:
    """So many requests/s by each worker of a pool, which decode's blocks may scale."""

    def of(deployment: Deployment) -> float:
        x, y, k = pool_sizes(deployment)
        blocks = deployment.pools[-1].num_blocks / 4000 if kv_matters else 1.0
        return k * colocated * blocks if k else min(x * prefill, y * decode * blocks)

    return of
