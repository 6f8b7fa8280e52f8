"""The model runner as workers use it: loading, refusals, steps, and the pool's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny_models import TINY, load_runner, piece, save_tiny_model, step, tokens

from twinpool.config import EngineConfig
from twinpool.engine.model_runner import ModelRunner, resolve_device, resolve_dtype, resolve_kv_dtype
from twinpool.engine.weights import weight_files
from twinpool.errors import ConfigError, ModelError
from twinpool.layout import Dtype
from twinpool.request import RequestKey


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, LlamaConfig(**TINY))
    return directory


@pytest.fixture
def runner(model_dir: Path) -> ModelRunner:
    return load_runner(model_dir)


def copy_of(directory: Path, target: Path) -> Path:
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def generate(runner: ModelRunner, ids: list[int], count: int, table: list[int], **sampling: Any) -> list[int]:
    """`count` tokens after `ids`, one step each after the prefill."""
    now, start, out = ids, 0, []
    for _ in range(count):
        output = runner.run(step(piece("a", now, start, table, **sampling)))
        start += len(now)
        now = list(output.token_ids.values())
        out += now
    return out


def test_the_pool_lies_in_the_memory_it_was_given(model_dir: Path) -> None:
    shared = SharedMemory(create=True, size=64 * 8 * 3 * 2 * 2 * 8 * 4)
    try:
        config = EngineConfig(str(model_dir), dtype="float32", block_size=8, num_blocks=64)
        runner = ModelRunner.load(config, lambda num_bytes: shared.buf[:num_bytes])
        runner.run(step(piece("a", tokens(9), 0, [5, 3])))
        first = runner.layout.block_bytes
        assert any(shared.buf[5 * first : 6 * first])
        assert not any(shared.buf[4 * first : 5 * first])
        assert bytes(runner.memory[3 * first : 4 * first]) == bytes(shared.buf[3 * first : 4 * first])
        runner.memory.release()
        del runner
    finally:
        shared.unlink()


def test_kv_bytes_can_be_copied_to_another_runner_which_goes_on_alike(model_dir: Path) -> None:
    prefill, decode = load_runner(model_dir), load_runner(model_dir)
    ids = tokens(21)
    first = prefill.run(step(piece("a", ids, 0, [9, 4, 7], temperature=0.0))).token_ids[RequestKey("a", 0)]
    for source, target in ((9, 30), (4, 11), (7, 12)):
        size = prefill.layout.block_bytes
        decode.memory[target * size : (target + 1) * size] = prefill.memory[
            source * size : (source + 1) * size
        ]
    now, out = first, [first]
    for position in range(21, 30):
        batch = step(piece("a", [now], position, [30, 11, 12, 13], temperature=0.0))
        now = decode.run(batch).token_ids[RequestKey("a", 0)]
        out.append(now)
    assert out == generate(prefill, ids, 10, [9, 4, 7, 2], temperature=0.0)


def test_a_chunk_without_sampling_gives_no_token(runner: ModelRunner) -> None:
    mixed = step(piece("a", [5], 0, [1], temperature=0.0), piece("b", tokens(7), 0, [2]))
    assert set(runner.run(mixed).token_ids) == {RequestKey("a", 0)}
    output = runner.run(step(piece("b", tokens(7), 0, [2])))
    assert output.token_ids == {}
    assert output.seconds > 0


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9}]
)
def test_a_sequence_resumed_from_its_emitted_tokens_goes_on_alike(
    runner: ModelRunner, sampling: dict[str, float]
) -> None:
    ids = tokens(10)
    whole = generate(runner, ids, 12, [3, 1, 4], **sampling, seed=42)
    resumed = generate(runner, ids + whole[:5], 7, [7, 8, 9], **sampling, seed=42)
    assert whole[5:] == resumed


def test_tokens_are_the_same_alone_and_among_others(runner: ModelRunner) -> None:
    prompts = [tokens(length, seed=length) for length in (3, 12, 25, 8)]
    tables = [[4 * i, 4 * i + 2, 4 * i + 1, 4 * i + 3] for i in range(4)]
    alone = [
        generate(runner, ids, 6, table, temperature=1.0, seed=i)
        for i, (ids, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    now: list[list[int]] = prompts
    starts, together = [0] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    for _ in range(6):
        batch = step(
            *(piece(str(i), now[i], starts[i], tables[i], temperature=1.0, seed=i) for i in range(4))
        )
        output = runner.run(batch)
        starts = [start + len(ids) for start, ids in zip(starts, now, strict=True)]
        now = [[output.token_ids[RequestKey(str(i), 0)]] for i in range(4)]
        for i in range(4):
            together[i] += now[i]
    assert together == alone


@pytest.mark.parametrize("max_model_len", [2, 3, 4])
def test_warm_up_runs_even_when_the_context_is_tiny(model_dir: Path, max_model_len: int) -> None:
    """And stays within it: nothing is computed for positions that the model does not have."""
    runner = load_runner(model_dir, max_model_len=max_model_len)
    before = runner.kv[:, :, :, :, max_model_len:].clone()
    runner.warm_up()
    assert torch.equal(runner.kv[:, :, :, :, max_model_len:], before)


def test_equal_models_have_equal_fingerprints_and_others_do_not(model_dir: Path, tmp_path: Path) -> None:
    first = load_runner(model_dir).fingerprint
    copy = copy_of(model_dir, tmp_path)
    assert load_runner(copy, num_blocks=200).fingerprint == first
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = load_runner(copy).fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert len({first, changed, load_runner(copy).fingerprint}) == 3


def test_a_sharded_model_is_read_like_a_whole_one(model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(weight_files(tmp_path)) > 1
    batch = step(piece("a", tokens(9), 0, [1, 2]))
    assert torch.equal(load_runner(tmp_path).logits(batch), load_runner(model_dir).logits(batch))


def test_pickled_weights_are_refused_with_the_reason(model_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(model_dir, tmp_path)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights could run code"):
        load_runner(copy)


def test_weights_that_do_not_fit_the_config_are_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(model_dir, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 90}))
    with pytest.raises(ModelError, match=r"gate_proj.weight .* has shape \(88, 48\).*says \(90, 48\)"):
        load_runner(copy)
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.3"):
        load_runner(copy)
    (copy / "model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(ModelError, match="no readable safetensors file"):
        load_runner(copy)


def test_a_context_beyond_the_models_own_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 257; allowed: 2 to 256"):
        load_runner(model_dir, max_model_len=257)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"--device is '{device}'; allowed: auto, cpu"):
        resolve_device(device)


def test_float16_is_refused_on_a_cpu_and_auto_is_a_type_it_computes_in() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="--dtype is 'float16'"):
        resolve_dtype("float16", cpu)
    assert resolve_dtype("auto", cpu) in (Dtype.FLOAT32, Dtype.BFLOAT16)
    assert resolve_dtype("bfloat16", cpu) is Dtype.BFLOAT16


def test_kv_in_8_bits_is_refused_on_a_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_kv_dtype("auto", Dtype.FLOAT32, cpu) is Dtype.FLOAT32
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'fp8'; allowed: auto on a CPU"):
        resolve_kv_dtype("fp8", Dtype.FLOAT32, cpu)
    assert resolve_kv_dtype("int8", Dtype.BFLOAT16, gpu) is Dtype.INT8


def test_memory_that_is_too_small_or_read_only_is_refused(model_dir: Path) -> None:
    config = EngineConfig(str(model_dir), dtype="float32", num_blocks=40)
    for memory in (memoryview(bytearray(8)), memoryview(bytes(40 << 20))):
        with pytest.raises(ConfigError, match="writable bytes"):
            ModelRunner.load(config, lambda _, memory=memory: memory)  # type: ignore[misc]


def test_an_own_family_runs_without_transformers_and_without_a_writable_cache(model_dir: Path) -> None:
    """In a new process whose cache directory cannot be made: the kernels compile in memory and work."""
    script = f"""
import sys
from twinpool.config import EngineConfig
from twinpool.engine.model_runner import ModelRunner
from twinpool.kernels.jit import KEEPS_COMPILED_CODE
config = EngineConfig({str(model_dir)!r}, dtype="float32", num_blocks=40)
runner = ModelRunner.load(config, lambda n: memoryview(bytearray(n)))
assert "transformers" not in sys.modules
assert not KEEPS_COMPILED_CODE
import torch
from twinpool.kernels.rms_norm import rms_norm
assert torch.equal(rms_norm(torch.zeros(1, 4), torch.ones(4), 1.0), torch.zeros(1, 4))
"""
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {
        "PYTHONPATH": source,
        "PATH": "/usr/bin:/bin",
        "XDG_CACHE_HOME": "/dev/null/no",
        "HOME": "/dev/null",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_pool_that_has_moved_holds_the_blocks_that_went_along(model_dir: Path) -> None:
    stays, moves = load_runner(model_dir), load_runner(model_dir)
    ids, blocks = tokens(21), [9, 4, 7]
    for runner in (stays, moves):
        runner.run(step(piece("a", ids[:20], 0, blocks)))
    moves.move_pool(memoryview(bytearray(len(moves.memory) + 4096)), blocks)
    assert len(moves.memory) == len(stays.memory)
    assert not any(moves.memory[: moves.layout.block_bytes])
    last = step(piece("a", ids[20:], 20, blocks))
    assert torch.equal(stays.logits(last), moves.logits(last))
