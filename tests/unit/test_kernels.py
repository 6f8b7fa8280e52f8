"""Every CPU kernel computes what its plain reference says, in float32 and bfloat16, on ragged shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twinpool.kernels.activation import silu_mul
from twinpool.kernels.kv_write import kv_write, kv_write_reference
from twinpool.kernels.paged_attention import (
    AttentionParams,
    PagedBatch,
    paged_attention,
    paged_attention_reference,
)
from twinpool.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from twinpool.kernels.rope_kv_write import rope_kv_write_, rope_kv_write_reference

DTYPES = [torch.float32, torch.bfloat16]
# Kernel and reference both compute in float32 and round once, so in bfloat16 they differ by at most one unit in the
# last place (2⁻⁷ relative), where the float32 results straddle a rounding border.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3}}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 576), (3, 65), (40, 48)])
def test_rms_norm_is_its_formula(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), **TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_leaves_the_sum_in_the_residual_and_norms_it(dtype: torch.dtype) -> None:
    x, residual, weight = (random(*shape, dtype=dtype) for shape in ((5, 33), (5, 33), (33,)))
    summed = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(normed, rms_norm_reference(summed, weight, 1e-6), **TOLERANCE[dtype])


def test_silu_mul_has_the_right_limits() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 90.0, 1e4]]))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 2, 24), (7, 7, 6)])
def test_queries_rotate_in_place_and_keys_and_values_reach_their_slots(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    angles = torch.rand(50, head_dim // 2) * 6
    positions, slots = torch.tensor([0, 49, 3, 3, 17, 1]), torch.tensor([47, 0, 8, 9, 30, 31])
    tables = (angles.cos(), angles.sin(), positions)
    qkv = random(6, heads + 2 * kv_heads, head_dim, dtype=dtype)
    pool = random(6, 3, 2, kv_heads, 8, head_dim, dtype=dtype)
    norms = [random(head_dim, dtype=dtype) if normed else None for _ in range(2)]
    wanted, wanted_pool = qkv.clone(), pool.clone()
    rope_kv_write_reference(wanted, *tables, wanted_pool, 1, slots, *norms, 1e-6)
    rope_kv_write_(qkv, *tables, pool, 1, slots, *norms, 1e-6)
    # A norm is rounded before it is rotated, and a rotation has two terms of which each may be a unit off.
    tolerance = {name: 4 * value for name, value in TOLERANCE[dtype].items()}
    torch.testing.assert_close(qkv[:, :heads], wanted[:, :heads], **tolerance)
    torch.testing.assert_close(pool, wanted_pool, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_fills_exactly_the_named_slots(dtype: torch.dtype) -> None:
    pool = random(6, 3, 2, 2, 8, 16, dtype=dtype)
    wanted = pool.clone()
    whole = random(5, 7, 16, dtype=dtype)
    key, value = whole[:, 3:5], random(2, 5, 16, dtype=dtype).transpose(0, 1)  # different strides
    slots = torch.tensor([47, 0, 8, 9, 30])
    kv_write_reference(wanted, 1, key, value, slots)
    kv_write(pool, 1, key, value, slots)
    assert torch.equal(pool, wanted)


def paged_batch(lengths: list[tuple[int, int]], block_size: int, num_blocks: int) -> PagedBatch:
    """Sequences of (all tokens, query tokens) in shuffled blocks."""
    order = torch.randperm(num_blocks).tolist()
    tables = [[order.pop() for _ in range(-(-end // block_size))] for end, _ in lengths]
    queries = sum(count for _, count in lengths)
    return PagedBatch(
        query_starts=np.cumsum([0, *(count for _, count in lengths)]),
        ends=np.array([end for end, _ in lengths]),
        block_tables=np.concatenate(tables),
        table_starts=np.cumsum([0, *map(len, tables)]),
        slots=torch.zeros(queries, dtype=torch.int64),
        positions=torch.zeros(queries, dtype=torch.int64),
    )


RAGGED = [(1, 1), (7, 1), (8, 1), (9, 1), (64, 1), (65, 8), (30, 30), (100, 60), (33, 3), (9, 9), (41, 17)]
PARAMS = {
    "plain": AttentionParams(0.25),
    "window": AttentionParams(0.25, window=11),
    "softcap": AttentionParams(0.5, softcap=3.0),
    "window and softcap": AttentionParams(0.25, window=40, softcap=5.0),
    "window of one": AttentionParams(0.25, window=1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (4, 4, 24), (5, 1, 64)])
def test_paged_attention_is_its_formula(
    heads: int, kv_heads: int, head_dim: int, params: AttentionParams, dtype: torch.dtype
) -> None:
    """Decode and chunks in one batch, shuffled blocks, garbage in every slot that is not the sequence's."""
    batch = paged_batch(RAGGED, 8, 80)
    kv = random(80, 2, 2, kv_heads, 8, head_dim, dtype=dtype)
    whole = random(int(batch.query_starts[-1]), heads + 3, head_dim, dtype=dtype)
    query = whole[:, :heads]
    found = paged_attention(query, kv, 1, batch, params)
    wanted = paged_attention_reference(query, kv, 1, batch, params)
    # Prefill rounds the softmax weights, and each of two partial results, to bfloat16 before the last rounding.
    slack = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6}}
    torch.testing.assert_close(found, wanted, **slack[dtype])


@pytest.mark.parametrize("count", [1, 30])
def test_attention_never_reads_a_slot_beyond_the_sequence(count: int) -> None:
    batch = paged_batch([(43, count)], 8, 8)
    kv = torch.full((8, 1, 2, 2, 8, 16), float("nan"))
    table = batch.table(0)
    for position in range(43):
        kv[table[position // 8], :, :, :, position % 8] = torch.randn(1, 2, 2, 16)
    out = paged_attention(torch.randn(count, 4, 16), kv, 0, batch, AttentionParams(0.25))
    assert torch.isfinite(out).all()


def test_attention_survives_scores_that_overflow_a_plain_softmax() -> None:
    batch = paged_batch([(20, 1), (20, 20)], 8, 8)
    kv = torch.randn(8, 1, 2, 1, 8, 16) * 40
    query = torch.randn(21, 2, 16) * 40
    wanted = paged_attention_reference(query, kv, 0, batch, AttentionParams(1.0))
    torch.testing.assert_close(
        paged_attention(query, kv, 0, batch, AttentionParams(1.0)), wanted, rtol=1e-4, atol=1e-4
    )


def test_queries_on_a_gpu_whose_batch_is_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, kv = paged_batch([(9, 1)], 8, 8), torch.randn(8, 1, 2, 1, 8, 16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True))
    with pytest.raises(ValueError, match="on_device"):
        paged_attention(torch.randn(1, 2, 16), kv, 0, batch, AttentionParams(0.25))
