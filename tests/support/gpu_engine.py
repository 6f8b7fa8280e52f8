"""Runners on the device of tests/gpu, and what they generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from twinpool.bench.engine.made_models import MadeShape
from twinpool.config import EngineConfig
from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.engine.gpu.host_mirror import HostMirror
from twinpool.engine.model_runner import ModelRunner
from twinpool.request import RequestKey, SamplingParams

SMALL = MadeShape(
    num_layers=3, hidden_size=192, num_heads=6, num_kv_heads=2, head_dim=64, intermediate_size=352,
    vocab_size=1031, max_positions=512, qk_norm=True,
)  # fmt: skip
BLOCK_SIZE = 16


def runner_on(device: torch.device, model: Path, dtype: str = "float32", **settings: Any) -> ModelRunner:
    """A runner whose pool is full of garbage."""
    config = EngineConfig(
        str(model), dtype, str(device), **{"block_size": BLOCK_SIZE, "num_blocks": 160} | settings
    )
    runner = ModelRunner.load(config, lambda num_bytes: memoryview(bytearray(num_bytes)))
    garbage = torch.randn(runner.kv.shape[1:], generator=torch.Generator().manual_seed(5)) * 30
    runner.kv.copy_(garbage.to(runner.kv.dtype))
    return runner


def mirror_of(runner: ModelRunner) -> tuple[HostMirror, memoryview]:
    """A mirror of the runner's pool, and its memory."""
    memory = memoryview(bytearray(runner.kv.numel() * runner.kv.element_size()))
    return HostMirror(runner.kv, memory), memory


def prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """One random prompt of each length."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def tables(num_seqs: int, num_blocks: int) -> list[tuple[int, ...]]:
    """Disjoint block tables, scattered over the pool."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    share = num_blocks // num_seqs
    return [tuple(order[i * share : (i + 1) * share]) for i in range(num_seqs)]


def generate(
    runner: ModelRunner, ids: Sequence[Sequence[int]], count: int, temperature: float = 0.0, chunk: int = 48
) -> list[list[int]]:
    """`count` tokens after each prompt: prompts in chunks, mixed with the decode steps of those that are through."""
    where = tables(len(ids), runner.num_blocks)
    done, all_ids = [0] * len(ids), [list(prompt) for prompt in ids]
    while any(len(found) < len(prompt) + count for found, prompt in zip(all_ids, ids, strict=True)):
        slices = []
        for i, found in enumerate(all_ids):
            if len(found) < len(ids[i]) + count:
                some = found[done[i] : done[i] + chunk]
                is_last = done[i] + len(some) == len(found)
                params = SamplingParams(max_tokens=count, seed=i, temperature=temperature, top_p=0.95)
                slices.append(
                    SequenceSlice(RequestKey(str(i), 0), some, done[i], where[i], params if is_last else None)
                )
                done[i] += len(some)
        ordered = sorted(slices, key=lambda piece: len(piece.token_ids) > 1)
        for key, token in runner.run(StepBatch(tuple(ordered))).token_ids.items():
            all_ids[int(key.request_id)].append(token)
    return [found[len(prompt) :] for found, prompt in zip(all_ids, ids, strict=True)]
