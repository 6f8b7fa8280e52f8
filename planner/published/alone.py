"""What needs no simulation: single requests, and transfers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.datasets.traces import csv_trace
from twinpool.planner.published.figures import Direction, Figure, Result
from twinpool.planner.step_shape import of_chunk, of_sequences, together
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.phases import Link
from twinpool.planner.times.registry import Conditions, roofline, service_times
from twinpool.planner.times.service_times import ServiceTimes

_SPLITWISE = "Splitwise, ISCA 2024"
_TRACES = {"coding": "azure_2023_code.csv", "conversation": "azure_2023_conversation.csv"}
_P50_MS = {
    ("coding", "a100"): (185.0, 52.0, 856.0),
    ("coding", "h100"): (95.0, 31.0, 493.0),
    ("conversation", "a100"): (155.0, 40.0, 4_957.0),
    ("conversation", "h100"): (84.0, 28.0, 3_387.0),
}
"""TTFT, TBT and E2E of Llama-70B."""


def results(public_data: Path) -> Iterator[Result]:
    """All of them. Raises ConfigError if a file is absent."""
    yield from splitwise_p50(public_data)
    yield from mooncake_transfer()
    yield recompute_or_pull()


def splitwise_p50(public_data: Path) -> Iterator[Result]:
    """Medians over the Azure traces of requests that are served one by one, by Splitwise's own table at TP 8."""
    traces = {name: csv_trace(str(public_data / "traces" / file)).shapes for name, file in _TRACES.items()}
    for (workload, device), published in _P50_MS.items():
        conditions = Conditions(tp=8, public_data=public_data)
        times = service_times(f"splitwise:{device}", SHAPES["llama-2-70b"], conditions)
        found = [_alone_ms(times, shape) for shape in traces[workload]]
        setting = f"Llama-70B, {device.upper()}, {workload}"
        names = ("TTFT P50", "TBT P50", "E2E P50")
        why = ("", "", "one hour of the trace; no batching")
        for name, said, values, reason in zip(names, published, zip(*found, strict=True), why, strict=True):
            yield Figure(_SPLITWISE, setting, name, said, median(values), "ms", reason)


def _alone_ms(times: ServiceTimes, shape: Shape) -> tuple[float, float, float]:
    """TTFT, TBT and E2E of a request that nothing else disturbs."""
    ttft = 1e3 * times.step_s(of_chunk(shape.input_tokens))
    tbt = 1e3 * times.step_s(of_sequences([shape.input_tokens + shape.output_tokens // 2]))
    return ttft, tbt, ttft + (shape.output_tokens - 1) * tbt


def mooncake_transfer() -> Iterator[Result]:
    """32,768 tokens of Qwen3-8B from one H800 node to another, over eight 200 Gb/s adapters each."""
    source, setting, model = (
        "Mooncake with vLLM v1",
        "Qwen3-8B, TP 8, H800, 32,768 tokens",
        SHAPES["qwen3-8b"],
    )
    taken_s = Link(25e9).transfer_s(32_768 * model.kv_elements * 2, 8)
    why = "the share of 70 % of the link was taken from this result, so it is no test of it"
    yield Figure(source, setting, "KV transfer", 31.65, 1e3 * taken_s, "ms", why)
    prompt_s = roofline("h100", model, Conditions(tp=8)).step_s(of_chunk(32_768))
    why = "TTFT of the roofline of 8 × H100, without the engine's time outside of the model"
    yield Figure(source, setting, "transfer / TTFT", 4.2, 100 * taken_s / (prompt_s + taken_s), "%", why)


def recompute_or_pull() -> Result:
    """From how many prompt tokens on pulling their KV is quicker than computing them beside 16 streams."""
    model = SHAPES["llama-3.1-8b"]
    times = roofline("h100", model)
    streams = of_sequences([1_024] * 16)
    kv_bytes = 2 * model.kv_elements

    def is_pull_quicker(num_tokens: int) -> bool:
        with_chunk = times.step_s(together(streams, of_chunk(num_tokens)))
        return times.transfer_s(num_tokens * kv_bytes) < with_chunk - times.step_s(streams)

    fewest = next((n for n in range(8, 4_097, 8) if is_pull_quicker(n)), None)
    return Direction(
        "vllm-project/vllm #55801",
        "short prompts, concurrency 16",
        "under 128 tokens recomputing beats pulling KV",
        "never" if fewest is None else f"under {fewest} tokens (Llama-3.1-8B, H100 roofline, 400 Gb/s)",
        fewest is not None and 16 <= fewest <= 512,
        "model and link of the report are not told",
    )
