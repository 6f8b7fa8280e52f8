"""Each Triton kernel between the matrix products and attention computes what its reference says, on ragged shapes;
without a CUDA device in Triton's interpreter, which shows what a kernel computes and not that it compiles."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE

from twinpool.kernels import block_copy
from twinpool.kernels.activation import silu_mul_reference
from twinpool.kernels.gpu import activation, rms_norm, rope_kv_write
from twinpool.kernels.gpu import block_copy as gpu_block_copy
from twinpool.kernels.kv_write import kv_write_reference
from twinpool.kernels.quantized_kv import pool_view
from twinpool.kernels.rms_norm import rms_norm_reference
from twinpool.kernels.rope import rope_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Both compute in float32 and round once, so in a 16-bit type they differ by a unit in the last place at most: where the
# float32 results straddle a rounding border, and in bfloat16 because the interpreter truncates instead of rounding.
UNIT = {torch.float32: 2**-17, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, units: int = 1) -> None:
    tolerance = units * UNIT[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance / 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 65), (2, 576), (5, 48)])
def test_rms_norm_is_its_formula(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    assert_close(rms_norm.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_norms_the_rounded_sum_that_it_leaves_in_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (random(*shape, dtype=dtype) for shape in ((5, 33), (5, 33), (33,)))
    summed = x + residual
    normed = rms_norm.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(residual, summed)
    assert_close(normed, rms_norm_reference(residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 1030), (7, 33)])
def test_silu_mul_is_its_formula(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype) * 6
    assert_close(activation.silu_mul(gate_up), silu_mul_reference(gate_up))


def test_silu_mul_has_the_right_limits() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert_close(activation.silu_mul(gate_up).cpu(), torch.tensor([[0.0, 0.0, 0.0, 90.0, 1e4]]))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 2, 24), (5, 1, 64), (7, 7, 6)])
def test_queries_rotate_in_place_and_keys_and_values_reach_their_slots(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    """The fourth token is padding: nothing is written for it, and no other slot changes."""
    angles = torch.rand(50, head_dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    positions, slots = torch.tensor([0, 49, 3, 0, 17, 1]), torch.tensor([47, 0, 8, -1, 9, 30])
    positions, slots = positions.to(DEVICE), slots.to(DEVICE)
    qkv = random(6, heads + 2 * kv_heads, head_dim, dtype=dtype)
    pool = random(6, 3, 2, kv_heads, 8, head_dim, dtype=dtype)
    query, key, value = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)
    weights = [random(head_dim, dtype=dtype) for _ in range(2)] if normed else [None, None]
    if normed:
        query, key = (rms_norm_reference(x, w, 1e-6) for x, w in zip((query, key), weights, strict=True))
    wanted, real = pool.clone(), slots >= 0
    rotated = rope_reference(key, cos, sin, positions)
    kv_write_reference(wanted, 1, rotated[real], value[real], slots[real])
    rope_kv_write.rope_kv_write_(qkv, cos, sin, positions, pool, 1, slots, *weights, 1e-6)
    # A norm is rounded before it is rotated, and a rotation has two terms of which each may be a unit off.
    units = 6 if normed else 1
    assert_close(qkv[real, :heads], rope_reference(query, cos, sin, positions)[real], units)
    assert_close(pool, wanted, units)
    untouched = torch.ones(48, dtype=torch.bool, device=DEVICE).index_fill(0, slots[real], False)
    for slot in untouched.nonzero().flatten().tolist():
        assert torch.equal(pool[slot // 8, :, :, :, slot % 8], wanted[slot // 8, :, :, :, slot % 8])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "part", [(slice(None), slice(None)), (slice(1, 3), slice(None)), (slice(2, 3), slice(1, 3))]
)
def test_blocks_reach_contiguous_memory_and_come_back(part: tuple[slice, slice], dtype: torch.dtype) -> None:
    layers, heads = part
    memory = torch.randint(256, (7 * 3 * 2 * 3 * 16 * 100 * 4,), dtype=torch.uint8, device=DEVICE)
    pool = pool_view(memory, (7, 3, 2, 3, 16, 96), dtype)
    block_ids, targets = (torch.tensor(ids, device=DEVICE) for ids in ([5, 0, 3], [1, 6, 2]))
    runs = block_copy.block_runs(pool[:, layers, :, heads])
    staging = runs.new_empty(3, *runs.shape[1:])
    gpu_block_copy.gather_blocks(runs, block_ids, staging)
    assert torch.equal(staging, runs[block_ids])
    wanted = memory.clone()
    wanted_pool = pool_view(wanted, (7, 3, 2, 3, 16, 96), dtype)
    block_copy.scatter_blocks(staging, block_copy.block_runs(wanted_pool[:, layers, :, heads]), targets)
    gpu_block_copy.scatter_blocks(staging, runs, targets)
    assert torch.equal(memory, wanted)
    assert torch.equal(runs[targets], staging)
