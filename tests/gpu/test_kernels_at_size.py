"""Every Triton kernel at the sizes of real models, against its reference in float32 on the same device. The ragged and
odd shapes are in tests/unit/test_gpu_*.py, which run on a GPU as well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.cuda import DEVICE, IS_REHEARSAL

from twinpool.engine.batch import SequenceSlice
from twinpool.engine.gpu.step_inputs import StepInputs
from twinpool.engine.host_inputs import HostInputs
from twinpool.engine.sampler import StepSampling
from twinpool.kernels.activation import silu_mul_reference
from twinpool.kernels.block_copy import block_runs
from twinpool.kernels.gpu import activation, block_copy, paged_attention, rms_norm, rope_kv_write, sampling
from twinpool.kernels.kv_write import kv_write_reference
from twinpool.kernels.paged_attention import AttentionParams, paged_attention_reference
from twinpool.kernels.rms_norm import rms_norm_reference
from twinpool.kernels.rope import rope_reference
from twinpool.kernels.sampling import sample_reference
from twinpool.request import RequestKey, SamplingParams

# In bfloat16 a sum of some thousand products is rounded once, and the softmax's weights before they are summed.
DTYPE, UNIT = (torch.float32, 2**-14) if IS_REHEARSAL else (torch.bfloat16, 2**-7)
SCALE = 0.02 if IS_REHEARSAL else 1.0
BLOCK_SIZE = 16
SHAPES = [(9, 3, 64)] if IS_REHEARSAL else [(9, 3, 64), (32, 8, 128), (64, 8, 128), (16, 1, 256)]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def scaled(size: int) -> int:
    """A real size; in a rehearsal, a small part of it."""
    return max(1, int(size * SCALE))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2 * UNIT, atol=2 * UNIT)


def sequences(sizes: Sequence[tuple[int, int]]) -> tuple[list[SequenceSlice], int]:
    """Slices of (tokens before, tokens), their blocks scattered; and how many blocks there are."""
    counts = [-(-(start + count) // BLOCK_SIZE) for start, count in sizes]
    order = torch.randperm(sum(counts)).tolist()
    slices = []
    for i, ((start, count), blocks) in enumerate(zip(sizes, counts, strict=True)):
        table = tuple(order.pop() for _ in range(blocks))
        slices.append(SequenceSlice(RequestKey(str(i), 0), [1] * count, start, table))
    return slices, sum(counts)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(
    "sizes",
    [
        [(8191, 1)],
        [(299, 1)] * 32,
        [(4000, 1), (17, 1), (2047, 1)],
        [(0, 2048)],
        [(700, 1), (6000, 512), (0, 300)],
    ],
    ids=["one long decode", "many decodes", "ragged decodes", "a prompt", "decode beside chunks"],
)
def test_attention(sizes: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> None:
    few = 2 if IS_REHEARSAL else len(sizes)
    slices, num_blocks = sequences([(scaled(start) if start else 0, scaled(n)) for start, n in sizes[:few]])
    pool = random(num_blocks, 2, 2, kv_heads, BLOCK_SIZE, head_dim)
    num_tokens = sum(len(piece.token_ids) for piece in slices)
    query = random(num_tokens, heads + 2 * kv_heads, head_dim)[:, :heads]
    on_device = StepInputs.of(slices, np.empty(0, np.int64), BLOCK_SIZE, DEVICE).batch.on_device
    assert on_device is not None
    params = AttentionParams(head_dim**-0.5)
    found = paged_attention.paged_attention(
        query, pool[:, 1], on_device, params, num_sms=None if not IS_REHEARSAL else 4
    )
    wanted = paged_attention_reference(query, pool, 1, HostInputs(BLOCK_SIZE).pack(slices)[1], params)
    assert_close(found, wanted)


@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_norms_and_activation(rows: int) -> None:
    rows, width, inner = scaled(rows), scaled(4096), scaled(14_336)
    x, residual, weight, gate_up = (
        random(rows, width),
        random(rows, width),
        random(width),
        random(rows, 2 * inner),
    )
    assert_close(rms_norm.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    summed = x + residual
    assert_close(rms_norm.add_rms_norm(x, residual, weight, 1e-5), rms_norm_reference(summed, weight, 1e-5))
    assert_close(residual, summed)
    assert_close(activation.silu_mul(gate_up), silu_mul_reference(gate_up))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_rotation_and_kv_write(heads: int, kv_heads: int, head_dim: int) -> None:
    tokens = scaled(2048)
    slices, num_blocks = sequences([(scaled(500), tokens)])
    batch = StepInputs.of(slices, np.empty(0, np.int64), BLOCK_SIZE, DEVICE).batch
    qkv = random(tokens, heads + 2 * kv_heads, head_dim)
    pool = random(num_blocks, 2, 2, kv_heads, BLOCK_SIZE, head_dim)
    wanted_pool = pool.clone()
    angles = torch.rand(scaled(4096), head_dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    turned = rope_reference(qkv[:, : heads + kv_heads], cos, sin, batch.positions)
    kv_write_reference(wanted_pool, 1, turned[:, heads:], qkv[:, heads + kv_heads :], batch.slots)
    rope_kv_write.rope_kv_write_(qkv, cos, sin, batch.positions, pool, 1, batch.slots, None, None, 0.0)
    assert_close(qkv[:, :heads], turned[:, :heads])
    assert_close(pool, wanted_pool)


def test_sampling_from_a_large_vocabulary() -> None:
    vocab_size, num_rows = scaled(128_256), 4 if IS_REHEARSAL else 64
    logits = torch.randn(num_rows, vocab_size, device=DEVICE) * 2
    kinds = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 50},
        {"temperature": 1.2, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.05},
    ]  # fmt: skip
    slices = [
        SequenceSlice(
            RequestKey(str(i), 0), [0], 100 + i, (0,),
            SamplingParams(**{"max_tokens": 1, "seed": i} | kinds[i % len(kinds)]),  # type: ignore[arg-type]
        )
        for i in range(num_rows)
    ]  # fmt: skip
    rows = StepSampling(slices).rows
    words = torch.from_numpy(rows.view(np.int32)).to(DEVICE)
    found = sampling.sample_rows(logits.clone(), words, None).tolist()
    wanted = []
    for row, piece in zip(logits.cpu(), slices, strict=True):
        params = piece.sampling
        assert params is not None
        shape = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, piece.end)
        wanted.append(sample_reference(row, *shape) if params.temperature > 0 else int(row.argmax()))
    assert found == wanted


def test_blocks_are_gathered_and_scattered_byte_for_byte() -> None:
    pool = random(scaled(600) + 3, scaled(32) + 1, 2, 8, BLOCK_SIZE, 128)
    runs, ids = block_runs(pool), torch.randperm(len(pool), device=DEVICE)[: scaled(200)]
    staging = torch.empty(len(ids), *runs.shape[1:], dtype=torch.uint8, device=DEVICE)
    block_copy.gather_blocks(runs, ids, staging)
    assert torch.equal(staging, runs[ids])
    target = torch.zeros_like(pool)
    block_copy.scatter_blocks(staging, block_runs(target), ids)
    assert torch.equal(target[ids], pool[ids])
    others = torch.ones(len(pool), dtype=torch.bool, device=DEVICE)
    others[ids] = False
    assert not bool(target[others].any())
