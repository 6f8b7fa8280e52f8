"""A machine with a GPU, torch, triton, numpy and safetensors, and nothing else of ours, runs the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twinpool.bench.engine.made_models import MadeShape, make_model

ABSENT = (
    "numba", "llvmlite", "msgspec", "xxhash", "psutil", "zmq", "fastapi", "ucxx", "cryptography", "uvloop",
    "prometheus_client", "setproctitle", "transformers", "gguf", "httpx", "rich",
)  # fmt: skip

STEPS = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
from twinpool.config import EngineConfig
from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.engine.model_runner import ModelRunner
from twinpool.request import RequestKey, SamplingParams
config = EngineConfig({model!r}, dtype={dtype!r}, num_blocks=40, max_model_len=64, device="cpu")
runner = ModelRunner.load(config, lambda num_bytes: memoryview(bytearray(num_bytes)))
runner.warm_up()
key, chosen = RequestKey("a", 0), [5, 17, 23, 99, 3]
for temperature in (0.0, 0.0, 1.0, 1.0):
    start = len(chosen) - 1 if len(chosen) > 5 else 0
    sampling = SamplingParams(max_tokens=9, seed=7, temperature=temperature)
    batch = StepBatch((SequenceSlice(key, chosen[start:], start, [3], sampling),))
    chosen.append(runner.run(batch).token_ids[key])
print(*chosen[5:], type(runner).__name__)
"""


def tokens_of_a_process(model: Path, dtype: str, absent: tuple[str, ...]) -> str:
    source = str(Path(__file__).resolve().parents[2] / "src")
    script = STEPS.format(absent=absent, model=str(model), dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_gives_the_same_tokens_without_the_compiler_and_the_servers_packages(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path, MadeShape())
    alone = tokens_of_a_process(model, "float32", ABSENT)
    assert alone.endswith("ModelRunner\n")
    assert alone == tokens_of_a_process(model, "float32", ())
