"""How fast the simulator is: `python -m twinpool.planner.simulator.speed`.

Chat-like requests (lengths as in the Azure conversation trace) come to a large split deployment at a rate that loads it
well. It prints requests per second of simulation, events, and the process's peak memory; with `--step-by-step` as
without, the results are the same to the last bit, which their digest shows.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import time
from collections.abc import Iterable

from twinpool.bench.serving.arrivals import Pacing, Process
from twinpool.bench.serving.datasets import make_shapes
from twinpool.bench.serving.datasets.settings import DatasetName, DatasetSettings, TooLong
from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.config import CoordinatorConfig, SchedulerConfig
from twinpool.errors import TwinpoolError
from twinpool.layout import Dtype
from twinpool.planner.deployment import Deployment, Pool
from twinpool.planner.plan.capacity import DeviceMemory, kv_capacity
from twinpool.planner.simulator.driver import simulate
from twinpool.planner.simulator.layout import parse_layout
from twinpool.planner.simulator.outcomes import Outcome
from twinpool.planner.simulator.requests import at_times
from twinpool.planner.times.devices import Precision, device_named
from twinpool.planner.times.model_shapes import model_shape
from twinpool.planner.times.registry import Conditions, roofline

BLOCK_SIZE = 16
MIB = 1 << 20


def main() -> None:
    """Simulates and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--num-requests", type=int, default=100_000, metavar="N", help="default 100000")
    parser.add_argument("--layout", default="64P192D", metavar="LAYOUT", help="default 64P192D")
    parser.add_argument("--rate", type=float, default=1500.0, metavar="R", help="requests/s (default 1500)")
    parser.add_argument(
        "--model", default="llama-3.1-8b", metavar="NAME", help="on one H100 (default llama-3.1-8b)"
    )
    parser.add_argument(
        "--dataset", default="azure-conversation", choices=[name.value for name in DatasetName], metavar="NAME",
        help="one that needs no file (default azure-conversation)",
    )  # fmt: skip
    parser.add_argument(
        "--step-by-step", action="store_true", help="each token by itself, as a server has it"
    )
    args = parser.parse_args()
    try:
        deployment = large_deployment(args.layout, args.model)
        shapes = requests(DatasetName(args.dataset), args.num_requests, args.rate, deployment.max_model_len)
    except TwinpoolError as exc:
        parser.error(str(exc))
    before_mib = _peak_mib()
    began_at = time.perf_counter()
    found = simulate(deployment, shapes, is_step_by_step=args.step_by_step)
    took_s = time.perf_counter() - began_at
    num_tokens = sum(len(outcome.times) for outcome in found.outcomes)
    num_steps = sum(worker.num_steps for worker in found.workers)
    mean_batch = (num_tokens - len(shapes)) / max(
        1, sum(w.num_steps for w in found.workers if w.role != "prefill")
    )
    print(f"{deployment.name}, {len(shapes):,} requests at {args.rate:g}/s, {num_tokens:,} tokens")
    print(f"{took_s:.1f} s: {len(shapes) / took_s:,.0f} requests/s, {num_tokens / took_s:,.0f} tokens/s")
    print(
        f"{found.num_events:,} events, {num_steps:,} steps, {mean_batch:.1f} sequences in one that decodes, "
        f"{found.duration_s:.1f} s of virtual time"
    )
    print(f"peak memory {_peak_mib():.0f} MiB, {before_mib:.0f} before the run")
    print(f"digest {digest(found.outcomes)}")


def large_deployment(layout: str, model: str) -> Deployment:
    """Workers of one H100 each."""
    shape, device = model_shape(model), device_named("h100")
    times = roofline("h100", shape, Conditions())
    kv = shape.kv_layout(BLOCK_SIZE, Dtype.BFLOAT16)
    longest = min(shape.max_positions, 16_384)
    weight_bytes = int(shape.weight_bytes(Precision.BF16.weight_bytes))
    capacity = kv_capacity(kv, weight_bytes, 1, DeviceMemory(device.memory_bytes), longest)
    config = SchedulerConfig(max_num_seqs=256, token_budget=2048)
    pools = tuple(
        Pool(part.role, part.num_workers, times, capacity.num_blocks, config) for part in parse_layout(layout)
    )
    queue = CoordinatorConfig(max_queue_requests=100_000, max_queue_tokens=1 << 30, max_wait_s=600.0)
    return Deployment(pools, kv, longest, queue)


def requests(name: DatasetName, num_requests: int, rate_per_s: float, max_model_len: int) -> list[Shape]:
    """So many at a rate, as a Poisson process."""
    settings = DatasetSettings(name=name, max_model_len=max_model_len, too_long=TooLong.CLIP)
    shapes = make_shapes(settings, num_requests, 0).shapes
    return at_times(shapes, Pacing(Process.POISSON, rate_per_s), 0)


def digest(outcomes: Iterable[Outcome]) -> str:
    """Of everything that clients saw."""
    found = hashlib.sha256()
    for outcome in outcomes:
        found.update(f"{outcome.index} {outcome.ending} {outcome.cached_tokens} {outcome.workers}".encode())
        found.update(outcome.times.tobytes())
    return found.hexdigest()[:16]


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


if __name__ == "__main__":
    main()
