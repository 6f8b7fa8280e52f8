"""Deployments and requests for simulations whose results can be told beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from twinpool.bench.serving.datasets.shapes import Shape, own
from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.layout import Dtype, KVLayout
from twinpool.planner.deployment import Deployment, Pool
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype=Dtype.FLOAT32)


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """A step takes `base_s`, and more for each sequence, context token, prompt token and chunk; `busy_share` of it more
    for each other worker of the machine. A transfer takes `start_s`, and `byte_s` for each byte."""

    base_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    prompt_token_s: float = 0.0
    chunk_s: float = 0.0
    busy_share: float = 0.0
    start_s: float = 0.0
    byte_s: float = 0.0
    overheads: Overheads = field(default_factory=Overheads)

    @property
    def name(self) -> str:
        """What it is."""
        return "linear"

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        """As the class says."""
        alone_s = (
            self.base_s
            + self.sequence_s * shape.num_sequences
            + self.context_s * shape.context_tokens
            + self.prompt_token_s * shape.prompt_tokens
            + self.chunk_s * shape.num_chunks
        )
        return alone_s * (1 + self.busy_share * num_busy)

    def transfer_s(self, num_bytes: int) -> float:
        """As the class says."""
        return self.start_s + self.byte_s * num_bytes


def split(
    num_prefill: int,
    num_decode: int,
    prefill: LinearTimes,
    decode: LinearTimes,
    *,
    num_blocks: int = 4096,
    prefill_config: SchedulerConfig | None = None,
    decode_config: SchedulerConfig | None = None,
    coordinator: CoordinatorConfig | None = None,
    machine: str | None = None,
    max_model_len: int = 32_768,
) -> Deployment:
    """xPyD, without a bound on what waits unless `coordinator` has one."""
    return Deployment(
        (
            Pool(
                Role.PREFILL,
                num_prefill,
                prefill,
                num_blocks,
                prefill_config or SchedulerConfig(),
                1,
                machine,
            ),
            Pool(Role.DECODE, num_decode, decode, num_blocks, decode_config or SchedulerConfig(), 1, machine),
        ),
        LAYOUT,
        max_model_len,
        coordinator or unbounded(),
    )


def colocated(
    num_workers: int,
    times: LinearTimes,
    *,
    num_blocks: int = 4096,
    config: SchedulerConfig | None = None,
    coordinator: CoordinatorConfig | None = None,
    machine: str | None = None,
    max_model_len: int = 32_768,
) -> Deployment:
    """K colocated workers, without a bound on what waits unless `coordinator` has one."""
    return Deployment(
        (Pool(Role.COLOCATED, num_workers, times, num_blocks, config or SchedulerConfig(), 1, machine),),
        LAYOUT,
        max_model_len,
        coordinator or unbounded(),
    )


def unbounded() -> CoordinatorConfig:
    """Nobody is refused, and nobody waits in vain."""
    return CoordinatorConfig(max_queue_requests=1_000_000, max_queue_tokens=1 << 40, max_wait_s=1e6)


def requests_at(times_s: Iterable[float], input_tokens: int, output_tokens: int) -> list[Shape]:
    """One at each time, all alike, with prompts of their own."""
    return [Shape((own(index, input_tokens),), output_tokens, at_s) for index, at_s in enumerate(times_s)]


def poisson_times(num_requests: int, rate_per_s: float, seed: int) -> Sequence[float]:
    """Rising times of a Poisson process."""
    dice, at_s, times = Random(seed), 0.0, []
    for _ in range(num_requests):
        at_s += dice.expovariate(rate_per_s)
        times.append(at_s)
    return times
