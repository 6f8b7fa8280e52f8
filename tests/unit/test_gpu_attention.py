"""The GPU's paged attention and KV writes compute what their references say, on ragged shapes and 8-bit pools; without
a CUDA device in Triton's interpreter, which shows what a kernel computes and not that it compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.triton_device import DEVICE

from twinpool.kernels.gpu import kv_write as gpu_kv_write
from twinpool.kernels.gpu import paged_attention as gpu
from twinpool.kernels.gpu.batch import DeviceBatch
from twinpool.kernels.gpu.rope_kv_write import rope_kv_write_
from twinpool.kernels.kv_write import kv_write_reference
from twinpool.kernels.paged_attention import AttentionParams, PagedBatch, paged_attention_reference
from twinpool.kernels.quantized_kv import dequantize, pool_view
from twinpool.kernels.rope import rope_reference

# Kernel and reference add in float32 and in different orders. In a 16-bit type the weights of the softmax are rounded
# before they are summed, and the result once more (in the interpreter, bfloat16 is cut off instead).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
PARAMS = {
    "plain": AttentionParams(0.25),
    "window": AttentionParams(0.25, window=11),
    "window beyond a part, and softcap": AttentionParams(0.25, window=300, softcap=5.0),
    "softcap": AttentionParams(0.5, softcap=3.0),
}
PADDING = (0, 1)
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def pool_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A pool of zeros."""
    row_bytes = shape[-1] * dtype.itemsize + 4 * (dtype == torch.int8)
    memory = torch.zeros(math.prod(shape[:-1]) * row_bytes, dtype=torch.uint8, device=DEVICE)
    return pool_view(memory, shape, dtype)


def batches(lengths: Sequence[tuple[int, int]], block_size: int) -> tuple[PagedBatch, DeviceBatch]:
    """Sequences of (all tokens, query tokens) in shuffled blocks, of which no two are the same and none is block 0, for
    the reference and for the kernel; table entries beyond a sequence point nowhere."""
    counts = [-(-end // block_size) for end, _ in lengths]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    starts = np.cumsum([0, *(queries for _, queries in lengths)])
    ends = np.array([end for end, _ in lengths])
    padded = [table + [2**31 - 1] * (max(counts) - len(table)) for table in tables]
    nowhere = torch.zeros(int(starts[-1]), dtype=torch.int64)
    num_decodes = next((i for i, (_, queries) in enumerate(lengths) if queries > 1), len(lengths))
    of_reference = PagedBatch(
        starts, ends, np.concatenate(tables).astype(np.int64), np.cumsum([0, *counts]), nowhere, nowhere
    )
    on_device = DeviceBatch(
        *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, ends, padded)),
        num_decodes=num_decodes,
        most_queries=max((queries for _, queries in lengths[num_decodes:]), default=0),
    )
    return of_reference, on_device


def filled(
    dtype: torch.dtype, num_blocks: int, kv_heads: int, block_size: int, head_dim: int
) -> torch.Tensor:
    """A pool of two layers, full of what `kv_write` makes of normal numbers."""
    pool = pool_of(dtype, num_blocks, 2, 2, kv_heads, block_size, head_dim)
    slots = torch.arange(num_blocks * block_size, device=DEVICE)
    for layer in range(2):
        numbers = torch.randn(2, len(slots), kv_heads, head_dim, device=DEVICE)
        key, value = numbers.to(dtype) if dtype.itemsize > 1 else numbers
        kv_write_reference(pool, layer, key, value, slots)
    return pool


def wanted_and_found(
    query: torch.Tensor, pool: torch.Tensor, lengths: Sequence[tuple[int, int]], params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, on_device = batches(lengths, pool.shape[4])
    wanted = paged_attention_reference(query, pool, 1, batch, params)
    return wanted, gpu.paged_attention(query, pool[:, 1], on_device, params, num_sms=4)


@pytest.mark.parametrize("splits", [1, 2, 11])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_decode_is_its_formula_in_however_many_parts(params: AttentionParams, splits: int) -> None:
    lengths = [(600, 1), (1, 1), (15, 1), (16, 1), (17, 1), (257, 1)]
    batch, on_device = batches(lengths, 16)
    pool = filled(torch.float32, 62, 2, 16, 64)
    query = torch.randn(6, 9, 64, device=DEVICE)[:, :6]
    wanted = paged_attention_reference(query, pool, 1, batch, params)
    found = torch.full_like(wanted, torch.nan)
    gpu.attend_decodes(query, pool[:, 1], on_device, params, found, splits)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "block_size"),
    [
        (torch.float32, 6, 2, 64, 16),
        (torch.float16, 2, 2, 80, 32),
        (torch.bfloat16, 8, 1, 128, 16),
        (torch.float16, 7, 1, 112, 64),
    ],
)
def test_a_batch_of_decodes_and_chunks_is_its_formula(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, params: AttentionParams
) -> None:
    """Whole prompts, chunks behind a prefix, tiles that end within a block, a last chunk of one token."""
    lengths = [(300, 1), (33, 1), (65, 8), (30, 30), (150, 70), (33, 3), (40, 1)]
    pool = filled(dtype, 60, kv_heads, block_size, head_dim)
    query = torch.randn(114, heads + 3, head_dim).to(dtype).to(DEVICE)[:, :heads]
    wanted, found = wanted_and_found(query, pool, lengths, params)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("pool_dtype", EIGHT_BITS)
def test_attention_over_an_8_bit_pool_is_that_over_the_numbers_in_it(pool_dtype: torch.dtype) -> None:
    lengths = [(300, 1), (33, 1), (65, 8), (70, 70)]
    pool = filled(pool_dtype, 62, 2, 16, 80)
    query = torch.randn(80, 6, 80, device=DEVICE)
    wanted, found = wanted_and_found(query, pool, lengths, AttentionParams(0.1))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("pool_dtype", "bound"), [(torch.int8, 0.01), (torch.float8_e4m3fn, 0.042)])
def test_attention_over_an_8_bit_pool_is_near_that_over_exact_numbers(
    pool_dtype: torch.dtype, bound: float
) -> None:
    """Vectors of 80 normal numbers have a largest of about 2.5. In steps of 1/127 of it they are off by 0.6 % (a step
    over √12, the root mean square), as floats with 3 bits of mantissa by 2.6 %. An average over keys is off by as much
    as its values are, and once more because scores of about 1 are: √2 times that."""
    torch.manual_seed(1)
    exact = filled(torch.float32, 20, 2, 16, 80)
    torch.manual_seed(1)
    pool = filled(pool_dtype, 20, 2, 16, 80)
    query = torch.randn(1, 6, 80, device=DEVICE)
    batch, on_device = batches([(300, 1)], 16)
    wanted = paged_attention_reference(query, exact, 1, batch, AttentionParams(80**-0.5))
    found = gpu.paged_attention(query, pool[:, 1], on_device, AttentionParams(80**-0.5), num_sms=4)
    error = (found - wanted).norm() / wanted.norm()
    assert bound / 2 < error < bound


def test_padding_reads_and_writes_nothing() -> None:
    batch, on_device = batches([(40, 1), PADDING, PADDING], 16)
    del batch
    on_device.block_tables[1:] = 2**31 - 1
    pool = filled(torch.float32, 5, 2, 16, 64)
    query = torch.randn(3, 6, 64, device=DEVICE)
    for splits in (1, 4):
        out = torch.full((3, 6, 64), 7.0, device=DEVICE)
        gpu.attend_decodes(query, pool[:, 1], on_device, PARAMS["plain"], out, splits)
        assert (out[1:] == 7.0).all()
        assert (out[0] != 7.0).all()
    chunks = DeviceBatch(on_device.query_starts, on_device.ends, on_device.block_tables, 0, 1)
    out = torch.full((3, 6, 64), 7.0, device=DEVICE)
    gpu.attend_chunks(query, pool[:, 1], chunks, PARAMS["plain"], out)
    assert (out[1:] == 7.0).all()
    assert (out[0] != 7.0).all()


@pytest.mark.parametrize("count", [1, 30])
def test_no_slot_beyond_the_sequence_is_read(count: int) -> None:
    batch, on_device = batches([(43, count)], 8)
    pool = torch.full((8, 1, 2, 2, 8, 16), torch.nan, device=DEVICE)
    for position in range(43):
        pool[batch.table(0)[position // 8], :, :, :, position % 8] = torch.randn(1, 2, 2, 16)
    query = torch.randn(count, 4, 16, device=DEVICE)
    assert torch.isfinite(
        gpu.paged_attention(query, pool[:, 0], on_device, AttentionParams(0.25), num_sms=1)
    ).all()


def test_scores_that_overflow_a_plain_softmax_do_not_overflow() -> None:
    pool = filled(torch.float32, 7, 1, 8, 16)
    pool *= 40
    query = torch.randn(21, 2, 16, device=DEVICE) * 40
    wanted, found = wanted_and_found(query, pool, [(20, 1), (20, 20)], AttentionParams(1.0))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("programs", "context", "num_sms", "splits"),
    [
        (3, 512, 132, 2),  # a sequence of 512 tokens has two parts that are worth it
        (3, 128 * 1024, 132, 128),
        (8, 32 * 1024, 132, 66),
        (64 * 8, 32 * 1024, 132, 2),
        (1024, 32 * 1024, 132, 1),  # the batch fills the GPU
        (1, 1, 132, 1),
    ],
)
def test_keys_are_split_until_the_gpu_is_full(programs: int, context: int, num_sms: int, splits: int) -> None:
    assert gpu.num_splits(programs, context, num_sms) == splits


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────

SLOTS = [47, 0, -1, 9, 30]


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [(dtype, pool) for dtype in (torch.float32, torch.bfloat16) for pool in (dtype, *EIGHT_BITS)],
)
def test_kv_write_stores_what_its_reference_stores_and_nothing_else(
    dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    """Vectors of all sizes, zeros among them; slices of wider rows; a slot of padding."""
    sizes = torch.tensor([1e-3, 1.0, 9.0, 100.0, 1000.0])[:, None, None]
    key = (torch.randn(5, 7, 80) * sizes).to(dtype).to(DEVICE)[:, 1:3]
    value = torch.randn(2, 5, 80).to(dtype).to(DEVICE).transpose(0, 1)
    value[0, 1] = 0
    wanted, found = (pool_of(pool_dtype, 3, 2, 2, 2, 16, 80) for _ in range(2))
    slots = torch.tensor(SLOTS, device=DEVICE)
    real = slots >= 0
    kv_write_reference(wanted, 1, key[real], value[real], slots[real])
    gpu_kv_write.kv_write(found[:, 1], key, value, slots)
    tolerance = 2**-7 if pool_dtype == torch.bfloat16 else 0.0  # which the interpreter cuts off
    torch.testing.assert_close(dequantize(found), dequantize(wanted), rtol=tolerance, atol=0.0)


def test_an_integer_is_off_by_half_a_step_at_most() -> None:
    vectors = torch.randn(32, 2, 64, device=DEVICE)
    pool = pool_of(torch.int8, 2, 1, 2, 2, 16, 64)
    gpu_kv_write.kv_write(pool[:, 0], vectors, -vectors, torch.arange(32, device=DEVICE))
    key = dequantize(pool[:, 0])[:, 0].transpose(1, 2).flatten(0, 1)
    bound = vectors.abs().amax(dim=-1, keepdim=True) / 127 / 2 * (1 + 1e-5)
    assert ((key - vectors).abs() <= bound).all()
    assert torch.equal(dequantize(pool[:, 0])[:, 1], -dequantize(pool[:, 0])[:, 0])


def test_an_8_bit_float_is_the_nearest_there_is() -> None:
    """Ties among them, steps below the normal numbers, and numbers that are too large."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    numbers = torch.cat(
        [codes, middles, middles * 1.0001, middles * 0.9999, torch.tensor([449.0, 1e9, 1e-12])]
    )
    numbers = torch.nn.functional.pad(numbers, (0, 512 - len(numbers))).view(1, 4, 128).to(DEVICE)
    pool = pool_of(torch.float8_e4m3fn, 1, 1, 2, 4, 16, 128)
    gpu_kv_write.kv_write(pool[:, 0], numbers, -numbers, torch.tensor([3], device=DEVICE))
    wanted = numbers.clamp(max=448).to(torch.float8_e4m3fn)
    assert torch.equal(pool[0, 0, 0, :, 3].float(), wanted[0].float())
    assert torch.equal(pool[0, 0, 1, :, 3].float(), -wanted[0].float())


def test_attention_reads_every_8_bit_float_as_the_number_it_is() -> None:
    """The output of a query that sees one key is that key's value."""
    _, on_device = batches([(1, 1)], 16)
    pool = pool_of(torch.float8_e4m3fn, 2, 1, 2, 1, 16, 256)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[codes & 127 == 127] = 0  # not a number
    pool.view(torch.uint8)[1, 0, 1, 0, 0] = codes
    query = torch.randn(1, 1, 256, device=DEVICE)
    found = gpu.paged_attention(query, pool[:, 0], on_device, AttentionParams(1.0), num_sms=1)
    assert torch.equal(found[0, 0], codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("pool_dtype", EIGHT_BITS)
def test_what_is_rotated_and_written_at_once_reaches_an_8_bit_pool(pool_dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 6 + 2 * 2, 80, device=DEVICE)
    before = qkv.clone()
    angles = torch.rand(50, 40, device=DEVICE) * 6
    positions, slots = torch.tensor([0, 49, 3, 17, 1], device=DEVICE), torch.tensor(SLOTS, device=DEVICE)
    pool, wanted = (pool_of(pool_dtype, 3, 2, 2, 2, 16, 80) for _ in range(2))
    rope_kv_write_(qkv, angles.cos(), angles.sin(), positions, pool, 1, slots, None, None, 0.0)
    real = slots >= 0
    key = rope_reference(before[:, 6:8], angles.cos(), angles.sin(), positions)
    kv_write_reference(wanted, 1, key[real], before[real, 8:], slots[real])
    # Where the rotated number lies on a border, rounding may fall to the neighbour: one step in an integer of 127, or
    # in 3 bits of mantissa.
    step = {torch.int8: 5.0 / 127, torch.float8_e4m3fn: 2**-3}[pool_dtype]
    torch.testing.assert_close(dequantize(pool), dequantize(wanted), rtol=step, atol=step / 8)
    assert (dequantize(pool) == dequantize(wanted)).float().mean() > 0.999
