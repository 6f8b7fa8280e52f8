"""Where splitting wins and where it loses, by rooflines: TaiChi, vLLM's documentation, llm-d, MoRI-IO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from twinpool.bench.serving.datasets.generated import lognormal_shapes
from twinpool.bench.serving.datasets.settings import LognormalLengths
from twinpool.bench.serving.metrics import request_metrics
from twinpool.bench.serving.slo import Slo
from twinpool.planner.deployment import Deployment
from twinpool.planner.plan.rates import highest_rate
from twinpool.planner.published.figures import Direction, Figure, Result
from twinpool.planner.published.stands import SEED, PoissonLoad, Worker, colocated, equal_load, load_of, split
from twinpool.planner.simulator.driver import simulate
from twinpool.planner.times.devices import DEVICES, Precision
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.registry import Conditions, roofline

_CHAT = LognormalLengths(
    input_median=1_024,
    input_sigma=0.8,
    input_most=8_192,
    output_median=192,
    output_sigma=0.7,
    output_most=1_024,
)
_NUM_WORKERS, _TP = 4, 4
_TIGHT_TTFT = Slo(ttft_s=0.5, tpot_s=0.2)
_TIGHT_TPOT = Slo(ttft_s=4.0, tpot_s=0.025)
_BUDGETS = (512, 2_048)
_LLM_D_TTFT_S = 0.532


def _worker(gpu: str, model: str, tp: int = 1, precision: Precision = Precision.BF16) -> Worker:
    times = roofline(gpu, SHAPES[model], Conditions(tp=tp, precision=precision))
    return Worker(DEVICES[gpu], SHAPES[model], times, tp, precision.weight_bytes)


def taichi(num_requests: int) -> Iterator[Result]:
    """The best of all layouts of four workers with Llama-3.1-70B on four H100 each, by the shape of the objectives."""
    load = load_of(lognormal_shapes(_CHAT, num_requests, SEED), num_requests)
    worker = _worker("h100", "llama-3.1-70b", _TP)
    setting = f"Llama-3.1-70B, {_NUM_WORKERS} × TP{_TP} H100 roofline, chat"
    claims = (
        ("colocated wins for tight TTFT with loose TPOT", _TIGHT_TTFT, False),
        ("splitting wins for tight TPOT with loose TTFT", _TIGHT_TPOT, True),
    )
    for claim, slo, is_split_better in claims:
        apart, both = _best(load, worker, partial(_goodput, load, slo))
        said = f"{slo}: split {apart[1]:.1f} req/s ({apart[0]}), colocated {both[1]:.1f} ({both[0]})"
        yield Direction(
            "TaiChi, arXiv 2508.01989", setting, claim, said, (apart[1] > both[1]) == is_split_better
        )
    many = replace(load, num_requests=4 * num_requests)
    apart, both = _best(many, worker, many.throughput)
    found = f"split {apart[1]:.1f} req/s ({apart[0]}), colocated {both[1]:.1f} ({both[0]})"
    said = f"{many.num_requests:,} at once: {found}"
    claim = "splitting does not raise throughput by itself"
    yield Direction("vLLM documentation", setting, claim, said, apart[1] <= both[1])


def _goodput(load: PoissonLoad, slo: Slo, deployment: Deployment) -> float:
    return load.goodput(deployment, slo, 0.9, 20.0)


def _best(
    load: PoissonLoad, worker: Worker, rate: Callable[[Deployment], float]
) -> tuple[tuple[str, float], tuple[str, float]]:
    """Name and rate of the best split and of the best colocated layout."""
    longest = load.longest
    splits = [split((p, worker), (_NUM_WORKERS - p, worker), longest) for p in range(1, _NUM_WORKERS)]
    apart = max(((each.name, rate(each)) for each in splits), key=lambda found: found[1])
    whole = [
        (f"chunks of {size:,}", rate(colocated(_NUM_WORKERS, worker, longest, size))) for size in _BUDGETS
    ]
    return apart, max(whole, key=lambda found: found[1])


def llm_d(num_requests: int) -> Iterator[Result]:
    """gpt-oss-120b: 8 prefill workers of one device and 2 decode workers of four, against 4 colocated ones of four.

    At the published 45 requests/s, and at the rate at which colocated workers have the published TTFT. Answers of 250
    tokens follow from the published means; prompts of 5,000 tokens are the guide's.
    """
    load = equal_load(5_000, 250, 4 * num_requests)
    one, four = (_worker("h200", "gpt-oss-120b", tp, Precision.FP4) for tp in (1, 4))
    together, apart = colocated(4, four, load.longest), split((8, one), (2, four), load.longest)

    def is_below(rate: float) -> float:
        return float(np.mean(load.run(together, rate).ttft_s) < _LLM_D_TTFT_S)

    scaled = highest_rate(is_below, start=100.0, most=1_000.0, target=0.5).rate
    why = (
        "device, prompts and the colocated layout are not told; on what is taken for them 45 req/s are a light load",
        "scaled to the load at which colocated workers have the published TTFT",
    )
    for rate, reason in zip((45.0, scaled), why, strict=True):
        before, after = load.run(together, rate), load.run(apart, rate)
        setting = (
            f"gpt-oss-120b, 5,000 in, 250 out, {rate:.0f} req/s, 16 × H200 roofline: 4 × TP4, then 8P2D(TP4)"
        )
        for claim, rises, values in (
            ("TTFT mean 532 → 1,400 ms", True, (before.ttft_s, after.ttft_s)),
            ("ITL mean 25 → 8 ms", False, (before.tpot_s, after.tpot_s)),
            ("E2E mean 6,700 → 3,500 ms", False, (before.e2e_s, after.e2e_s)),
        ):
            was, now = (1e3 * float(np.mean(each)) for each in values)
            said = f"{was:,.0f} → {now:,.0f} ms"
            yield Direction("llm-d PD guide", setting, claim, said, (now > was) == rises, reason)


def mori_io() -> Iterator[Result]:
    """Qwen3-235B-A22B in FP8 on one node of 8 × MI300X: how many of 100 requests are within the objectives. Whether its
    ITL is the mean or the longest gaps is not told; the p99 of a request's gaps is the stricter reading."""
    load, rate = equal_load(2_000, 1_000, 100), 8.0
    eight, four = (_worker("mi300x", "qwen3-235b-a22b", tp, Precision.FP8) for tp in (8, 4))
    layouts = (
        ("1 × TP8", 26.0, colocated(1, eight, load.longest)),
        ("2 × TP4", 30.0, colocated(2, four, load.longest)),
        ("1P1D of TP4, push", 73.0, split((1, four), (1, four), load.longest)),
    )
    slo = Slo(ttft_s=1.0, itl_p99_s=0.05)
    setting = "Qwen3-235B-A22B FP8, 8 × MI300X roofline, 8 req/s, 2,000 in, 1,000 out"
    shapes = load.traffic.stretch(rate, load.num_requests, 0, SEED)
    why = "the roofline has the shares of an H100's kernels; what vLLM's reached there, it does not know"
    for name, published, deployment in layouts:
        seen = [request_metrics(outcome.record()) for outcome in simulate(deployment, shapes).outcomes]
        met = sum(slo.is_met(request) for request in seen)
        what = f"{name}: TTFT within 1 s, ITL p99 within 50 ms"
        yield Figure("vLLM MoRI-IO blog, 2026", setting, what, published, float(met), "of 100", why)
