"""Deployments and loads of published experiments, for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twinpool.bench.serving.datasets.generated import random_shapes
from twinpool.bench.serving.datasets.settings import RandomLengths
from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.slo import Slo
from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.layout import Dtype
from twinpool.planner.deployment import Deployment, Pool
from twinpool.planner.plan.capacity import DeviceMemory, kv_capacity
from twinpool.planner.plan.experiments import Seen
from twinpool.planner.plan.rates import highest_rate
from twinpool.planner.plan.simulated import simulated
from twinpool.planner.plan.traffic import Traffic, traffic_of
from twinpool.planner.simulator.driver import simulate
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.devices import Device
from twinpool.planner.times.model_shapes import ModelShape
from twinpool.planner.times.service_times import Overheads, ServiceTimes

SEED = 7
BLOCK_TOKENS = 16
MAX_NUM_SEQS = 256
_MOST_PER_S, _WIDTH = 10_000.0, 3
WHOLE_PROMPTS = 8_192
"""Token budget of steps that take prompts whole, as engines without chunked prefill do."""
UNBOUNDED = CoordinatorConfig(max_queue_requests=1_000_000, max_queue_tokens=1 << 40, max_wait_s=86_400.0)
"""Nobody is refused: a published run has no admission control."""


class TurnByTurn:
    """`ServiceTimes` of an engine that stops its streams for prompts, as vLLM did in 2023: what is one step here takes
    it a step of the prompts, then one of the streams."""

    def __init__(self, times: ServiceTimes) -> None:
        self._times = times

    @property
    def name(self) -> str:
        """The other's."""
        return f"{self._times.name}, prompts and streams turn by turn"

    @property
    def overheads(self) -> Overheads:
        """The other's."""
        return self._times.overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        """Both, one after the other."""
        streams = StepShape(shape.num_sequences, shape.context_tokens)
        prompts = shape._replace(num_sequences=0, context_tokens=0)
        return self._times.step_s(prompts, num_busy) + self._times.step_s(streams, num_busy)

    def transfer_s(self, num_bytes: int) -> float:
        """The other's."""
        return self._times.transfer_s(num_bytes)


@dataclass(frozen=True, slots=True)
class Worker:
    """What a pool has so many of: `tp` devices with a model, and their times."""

    device: Device
    model: ModelShape
    times: ServiceTimes
    tp: int = 1
    weight_bytes_each: float = 2.0

    def pool(self, role: Role, count: int, longest: int, token_budget: int) -> Pool:
        """Workers that hold `longest` tokens of one sequence at least."""
        capacity = kv_capacity(
            self.model.kv_layout(BLOCK_TOKENS, Dtype.BFLOAT16),
            round(self.model.weight_bytes(self.weight_bytes_each)),
            self.tp,
            DeviceMemory(self.device.memory_bytes),
            longest,
        )
        scheduler = SchedulerConfig(token_budget=token_budget, max_num_seqs=MAX_NUM_SEQS)
        return Pool(role, count, self.times, capacity.num_blocks, scheduler, self.tp)


def split(prefill: tuple[int, Worker], decode: tuple[int, Worker], longest: int) -> Deployment:
    """xPyD; prompts are computed whole."""
    pools = (
        prefill[1].pool(Role.PREFILL, prefill[0], longest, WHOLE_PROMPTS),
        decode[1].pool(Role.DECODE, decode[0], longest, WHOLE_PROMPTS),
    )
    return _deployment(pools, prefill[1], longest)


def colocated(count: int, worker: Worker, longest: int, token_budget: int = WHOLE_PROMPTS) -> Deployment:
    """Workers that do both, in steps of at most `token_budget` tokens."""
    return _deployment((worker.pool(Role.COLOCATED, count, longest, token_budget),), worker, longest)


def _deployment(pools: tuple[Pool, ...], worker: Worker, longest: int) -> Deployment:
    layout = worker.model.kv_layout(BLOCK_TOKENS, Dtype.BFLOAT16)
    return Deployment(pools, layout, longest, UNBOUNDED)


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """Requests in a Poisson process: of a dataset's lengths, `num_requests` in a run."""

    traffic: Traffic
    num_requests: int
    longest: int

    def run(self, deployment: Deployment, rate_per_s: float) -> Seen:
        """What clients see at this rate, after a warm-up."""
        return simulated(deployment, self.traffic.stretch(rate_per_s, self.num_requests, 0, SEED))

    def goodput(self, deployment: Deployment, slo: Slo, share: float, start: float) -> float:
        """The highest rate at which that share of the requests is within `slo`; the search begins at `start`."""
        found = highest_rate(
            lambda rate: self.run(deployment, rate).share_good(slo),
            start=start,
            most=_MOST_PER_S,
            target=share,
            width=_WIDTH,
        )
        return found.rate

    def throughput(self, deployment: Deployment) -> float:
        """Requests per second if all come at once."""
        shapes = self.traffic.stretch(_MOST_PER_S, self.num_requests, 0, SEED)
        return self.num_requests / simulate(deployment, shapes).duration_s


def load_of(shapes: Sequence[Shape], num_requests: int) -> PoissonLoad:
    """These requests, over and over."""
    untimed = [replace(shape, at_s=None) for shape in shapes]
    longest = max(shape.input_tokens + shape.output_tokens for shape in shapes)
    return PoissonLoad(traffic_of(untimed, 1.0), num_requests, longest)


def equal_load(input_tokens: int, output_tokens: int, num_requests: int) -> PoissonLoad:
    """Requests of one length."""
    return load_of(
        random_shapes(RandomLengths(input_tokens, output_tokens), num_requests, SEED), num_requests
    )
