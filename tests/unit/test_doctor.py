"""What `twinpool doctor` makes of a machine's facts, and that it can collect them here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from twinpool.commands import doctor
from twinpool.commands.doctor import KNOWN_MODELS, examine, what_fits
from twinpool.commands.machine import CpuKernels, Gpu, Machine
from twinpool.config import EngineConfig
from twinpool.engine.kv_memory import pool_size
from twinpool.layout import Dtype, KVLayout

GIB = 1 << 30
PLAIN = Machine(
    system="Linux x86_64",
    python="3.11.0",
    packages={"torch": "2.13.0+cpu"},
    cpu="a processor",
    usable_cores=2,
    native_bf16=True,
    memory_bytes=24 * GIB,
    usable_memory_bytes=20 * GIB,
    memory_limit_bytes=None,
    shm_free_bytes=12 * GIB,
    gpus=(),
    ucx_transports=("cuda_ipc", "posix", "tcp"),
    ucx_problem=None,
    kernels=CpuKernels(
        has_tiles=True,
        has_pair_products=True,
        uses_tiles=True,
        tiles_setting=None,
        directory="/cache",
        num_stacks=2,
    ),
)
WITH_GPU = replace(PLAIN, gpus=(Gpu("a device", 80 * GIB, 79 * GIB, "9.0"),))


def kernels(**changes: object) -> Machine:
    assert PLAIN.kernels is not None
    return replace(PLAIN, kernels=replace(PLAIN.kernels, **changes))  # type: ignore[arg-type]


LACKS = {
    "software": replace(PLAIN, packages={}),
    "processor": replace(PLAIN, usable_cores=1),
    "cpu kernels": kernels(uses_tiles=False),
    "compiled code": kernels(num_stacks=0),
    "memory": replace(PLAIN, usable_memory_bytes=GIB, memory_limit_bytes=GIB),
    "shared memory": replace(PLAIN, shm_free_bytes=64 << 20),
    "devices": PLAIN,
    "ucx": replace(PLAIN, ucx_transports=(), ucx_problem="the package ucxx is not installed"),
}


@pytest.mark.parametrize("topic", LACKS)
def test_each_lack_comes_with_advice(topic: str) -> None:
    assert {f.topic for f in examine(LACKS[topic]) if f.advice is not None} == {topic, "devices"}


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (PLAIN, "bfloat16 products in matrix tiles (AMX); --weights int8 is possible"),
        (WITH_GPU, "--weights int8 is possible with --device cpu"),
        (
            kernels(uses_tiles=False, has_tiles=False),
            "in AVX512-BF16's pair products, not in matrix tiles (AMX): the",
        ),
        (kernels(uses_tiles=False, has_tiles=False, has_pair_products=False), "float32 vectors"),
        (kernels(uses_tiles=False, tiles_setting="0"), "(AMX): TWINPOOL_AMX is 0;"),
        (kernels(uses_tiles=False, tiles_setting="1"), "but this process may not use them"),
        (replace(PLAIN, kernels=None), "--weights int8 is not possible"),
        (kernels(num_stacks=1), "the decoder of this version in 1 variant, in /cache"),
        (kernels(num_stacks=0), "none yet of this version in /cache"),
        (kernels(directory=None, num_stacks=0), "cannot be kept"),
    ],
)
def test_the_kernels_of_the_processor_are_told(machine: Machine, words: str) -> None:
    told = [f.words for f in examine(machine) if f.topic in ("cpu kernels", "compiled code")]
    assert sum(words in line for line in told) == 1


def test_a_machine_with_a_gpu_lacks_nothing() -> None:
    machine = replace(WITH_GPU, native_bf16=False, kernels=None)
    assert [f for f in examine(machine) if f.advice is not None] == []
    assert any("a device (79 GiB of 80 GiB free" in f.words for f in examine(machine))


def test_what_fits_counts_program_weights_and_one_full_sequence() -> None:
    """Llama 3.1 8B: 16.06 GB of bfloat16 weights, 128 KiB × 131,072 tokens = 16 GiB of KV."""
    fits = {(fit.model, fit.dtype): fit for fit in what_fits(PLAIN)}
    eight = fits["Llama-3.1-8B", "bfloat16"]
    assert (eight.weight_bytes, eight.sequence_bytes) == (16_060_522_496, 16 * GIB)
    assert eight.worker_bytes == eight.weight_bytes + eight.sequence_bytes + GIB // 2
    assert eight.num_workers == 0
    room = 20 * GIB - GIB // 2 - 16_060_522_496
    assert eight.context_tokens == room // (16 * 128 << 10) * 16, "whole blocks of 16 tokens"
    assert fits["SmolLM2-135M-Instruct", "float32"].num_workers > 2
    assert fits["Llama-3.1-70B", "bfloat16"].context_tokens == 0


def test_settings_that_a_model_needs_are_named_and_enough() -> None:
    """What the report tells to set is what the engine then accepts."""
    machine = replace(PLAIN, usable_memory_bytes=40 * GIB)
    models = {model.name: model for model in KNOWN_MODELS}
    default = EngineConfig("model").kv_memory_fraction
    for fit in what_fits(machine):
        if fit.context_tokens < 1024:
            continue
        model, dtype = models[fit.model], Dtype(fit.dtype)
        layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, 16, dtype)
        length = model.max_positions if fit.num_workers else fit.context_tokens
        config = EngineConfig(
            "model",
            kv_memory_fraction=max(default, fit.kv_memory_fraction),
            workers_on_host=min(fit.num_workers, 2) or 1,
        )
        size = pool_size(config, layout, length, machine.usable_memory_bytes, fit.weight_bytes)
        assert size.num_max_len_seqs >= 1
    verdicts = {(fit.model, fit.dtype): doctor._verdict(fit) for fit in what_fits(machine)}
    assert verdicts["SmolLM2-135M-Instruct", "bfloat16"].endswith("workers, split or colocated")
    # Two workers take 2 × 4.375 of 40 GiB: less than the default; float32 takes twice as much.
    assert verdicts["Qwen3-0.6B", "bfloat16"] == "6 workers, split or colocated"
    assert verdicts["Qwen3-0.6B", "float32"] == "3 workers, split or colocated: --kv-memory-fraction 0.44"
    assert verdicts["Llama-3.1-8B", "bfloat16"] == "one worker: --colocated 1 --kv-memory-fraction 0.40"
    assert verdicts["Qwen3-14B", "bfloat16"] == "one worker: --colocated 1"
    assert verdicts["Llama-3.1-70B", "bfloat16"] == "no"


def test_each_gpu_holds_its_own_workers() -> None:
    gpu = Gpu("a device", 80 * GIB, 79 * GIB, "9.0")
    one, two = (what_fits(replace(PLAIN, gpus=(gpu,) * count)) for count in (1, 2))
    assert [fit.num_workers * 2 for fit in one] == [fit.num_workers for fit in two]
    assert {fit.dtype for fit in one} == {"bfloat16"}


def test_known_shapes_take_their_published_kv_bytes() -> None:
    per_token = {m.name: m.sequence_bytes(Dtype.BFLOAT16) // m.max_positions for m in KNOWN_MODELS}
    assert per_token["SmolLM2-135M-Instruct"] == 2 * 30 * 3 * 64 * 2
    assert per_token["Llama-3.1-8B"] == 128 << 10


def test_the_command_reports_this_machine_as_json() -> None:
    source = Path(__file__).parents[2] / "src"
    code = f"import sys; sys.path.insert(0, {str(source)!r}); from twinpool.cli import main; sys.exit(main())"
    child = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert {finding["topic"] for finding in report["findings"]} >= {"cpu kernels", "compiled code"}
    assert report["machine"]["usable_cores"] >= 1
    assert 0 < report["machine"]["usable_memory_bytes"] <= report["machine"]["memory_bytes"]
    assert set(report["copy_gb_per_s"]) == {"memory", "shared_memory", "loopback_tcp"}
    assert report["copy_gb_per_s"]["memory"] > 0
    assert {finding["topic"] for finding in report["findings"]} >= {"copying", "default model", "ucx"}
    assert len(report["models"]) >= len(KNOWN_MODELS)
