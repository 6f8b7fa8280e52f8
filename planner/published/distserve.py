"""DistServe's figures, by its own coefficients (`distserve:MODEL`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from twinpool.bench.serving.datasets.generated import lognormal_shapes
from twinpool.bench.serving.datasets.settings import LognormalLengths
from twinpool.bench.serving.slo import Slo
from twinpool.planner.published.figures import Direction, Figure, Result
from twinpool.planner.published.stands import SEED, TurnByTurn, Worker, colocated, equal_load, load_of, split
from twinpool.planner.times.devices import DEVICES
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.registry import Conditions, service_times

_SOURCE = "DistServe, OSDI 2024"
_FIGURE_1 = Slo(ttft_s=0.4, tpot_s=0.04)
"""The horizontal lines of the figure."""
_TABLE_2 = Slo(ttft_s=0.4, tpot_s=0.1)
_ATTAINED = {  # requests/s: vLLM, DistServe-Low, in percent
    1.0: (97.0, 100.0),
    1.5: (65.5, 100.0),
    2.0: (52.8, 99.3),
    2.5: (44.9, 87.3),
    3.0: (36.7, 83.0),
    3.5: (27.8, 77.3),
    4.0: (23.6, 70.0),
}
_SHAREGPT = LognormalLengths(
    input_median=1_000.0,
    input_sigma=0.8,
    input_most=1_500,
    output_median=188.0,
    output_sigma=0.8,
    output_most=548,
)
"""Their means are 754 and 199 tokens."""


def _worker(model: str, tp: int, public_data: Path) -> Worker:
    shape = SHAPES[model]
    times = service_times(f"distserve:{model}", shape, Conditions(tp=tp, public_data=public_data))
    return Worker(DEVICES["a100"], shape, times, tp)


def figure_1(public_data: Path, num_requests: int) -> Iterator[Result]:
    """OPT-13B on single A100, 512 tokens in and 64 out: the highest rates at which 90 % are within the objectives."""
    load, worker = equal_load(512, 64, num_requests), _worker("opt-13b", 1, public_data)
    longest = load.longest
    ttft, tpot = Slo(ttft_s=_FIGURE_1.ttft_s), Slo(tpot_s=_FIGURE_1.tpot_s)
    turns = replace(worker, times=TurnByTurn(worker.times))
    both = load.goodput(colocated(1, turns, longest), _FIGURE_1, 0.9, 2.0)
    prefill = load.goodput(split((1, worker), (8, worker), longest), ttft, 0.9, 6.0)
    decode = load.goodput(split((8, worker), (1, worker), longest), tpot, 0.9, 10.0)
    apart = load.goodput(split((2, worker), (1, worker), longest), _FIGURE_1, 0.9, 10.0) / 3
    setting = "OPT-13B, 512 in, 64 out, A100, P90 of TTFT 0.4 s and TPOT 0.04 s (taken from the figure)"
    faster = "the coefficients, published with the code, are of an engine that is about twice as fast"
    yield Figure(_SOURCE, setting, "colocated (vLLM)", 1.6, both, "req/s", f"{faster}; vLLM's are not told")
    yield Figure(_SOURCE, setting, "prefill only", 5.6, prefill, "req/s", faster)
    yield Figure(_SOURCE, setting, "decode only", 10.0, decode, "req/s", faster)
    yield Figure(_SOURCE, setting, "2P1D per GPU", 3.3, apart, "req/s", faster)
    yield Figure(_SOURCE, setting, "decode only / prefill only", 10 / 5.6, decode / prefill, "×")
    yield Direction(_SOURCE, setting, "2P1D serves 2.1 × as much per GPU as colocated", f"{apart / both:.2f} ×",
                    apart > both)  # fmt: skip


def table_2(public_data: Path, num_requests: int) -> Iterator[Result]:
    """OPT-66B and ShareGPT: the share of requests within the objectives. ShareGPT's texts are not here: lengths are
    log-normal with the means that the paper tells, 755 and 200 tokens, within OPT's context."""
    load = load_of(lognormal_shapes(_SHAREGPT, num_requests, SEED), num_requests)
    worker = _worker("opt-66b", 4, public_data)
    turns = replace(worker, times=TurnByTurn(worker.times))
    apart, both = split((1, worker), (1, worker), 2_048), colocated(1, turns, 2_048)
    setting = "OPT-66B, ShareGPT, TTFT 0.4 s, TPOT 0.1 s"
    why_apart = "lengths are not ShareGPT's; decode has TP 4 in place of TP 2 × PP 2"
    why_both = "lengths are not ShareGPT's; coefficients are of DistServe's engine, not of vLLM"
    for rate, (vllm, low) in _ATTAINED.items():
        served = 100 * load.run(apart, rate).share_good(_TABLE_2)
        yield Figure(_SOURCE, setting, f"DistServe-Low, {rate} req/s", low, served, "%", why_apart)
        served = 100 * load.run(both, rate).share_good(_TABLE_2)
        yield Figure(_SOURCE, setting, f"vLLM, {rate} req/s", vllm, served, "%", why_both)
        why_apart = why_both = "as above"
