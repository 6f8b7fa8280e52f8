"""Mooncake's sweep over ratios of prefill to decode nodes, by the roofline and its own trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from twinpool.bench.serving.datasets.traces import jsonl_trace
from twinpool.bench.serving.slo import Slo
from twinpool.config import SchedulerConfig
from twinpool.layout import Dtype
from twinpool.planner.plan.bounds import bound
from twinpool.planner.plan.capacity import DeviceMemory, kv_capacity
from twinpool.planner.plan.layouts import Layout, LayoutSpace, WorkerKind
from twinpool.planner.plan.traffic import lengths_of
from twinpool.planner.published.figures import Direction, Result
from twinpool.planner.published.stands import BLOCK_TOKENS, MAX_NUM_SEQS, WHOLE_PROMPTS
from twinpool.planner.times.devices import DEVICES
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.roofline import Roofline

_TRACE, _TRACE_BLOCK = "traces/mooncake_conversation.jsonl", 512
_NUM_NODES = 16
_PREFILL_NODES = (5, 6, 7, 8, 9, 10, 11)
_SLO = Slo(tpot_s=0.1)
_A800 = replace(DEVICES["a100"], name="a800", title="A800", scale_up_bytes_per_s=200e9)
"""An A100 with 400 GB/s of NVLink in both directions together."""


def ratios(public_data: Path) -> Result:
    """LLaMA3-70B on 16 nodes of 8 A800, the conversation trace: what each ratio serves at best, in closed form (a
    simulation long enough for an objective of 30 s takes hours)."""
    shapes = jsonl_trace(str(public_data / _TRACE), _TRACE_BLOCK).shapes
    model = SHAPES["llama-3.1-70b"]
    longest = max(each.input_tokens + each.output_tokens for each in shapes)
    kv = model.kv_layout(BLOCK_TOKENS, Dtype.BFLOAT16)
    weight_bytes = round(model.weight_bytes(2.0))
    capacity = kv_capacity(kv, weight_bytes, 8, DeviceMemory(_A800.memory_bytes), longest)
    scheduler = SchedulerConfig(token_budget=WHOLE_PROMPTS, max_num_seqs=MAX_NUM_SEQS)
    kind = WorkerKind(Roofline(_A800, model, tp=8), capacity)
    space = LayoutSpace({8: kind}, kv, longest, scheduler, scheduler, (WHOLE_PROMPTS,))
    lengths = lengths_of(shapes)
    found = {
        prefill: bound(space, Layout(prefill, _NUM_NODES - prefill, 0, 8, 8), lengths, _SLO)
        for prefill in _PREFILL_NODES
    }
    best = max(found, key=lambda prefill: found[prefill].rate_per_s)
    said = ", ".join(
        f"{prefill}P{_NUM_NODES - prefill}D {each.rate_per_s:.1f} req/s ({each.limit})"
        for prefill, each in found.items()
    )
    return Direction(
        "Mooncake, FAST 2025",
        "LLaMA3-70B, 16 × 8 A800 roofline, conversation trace, TPOT 0.1 s, closed form",
        "prefill : decode ≈ 1 : 1 is best from 5 : 11 to 11 : 5",
        said,
        best == _NUM_NODES // 2,
        "prompts of 12,035 tokens and answers of 343 bind in prefill at every ratio here, even with all reuse: the "
        "roofline's decode nodes, with 100 sequences at a time, have more room than Mooncake's engine had",
    )
