"""The CPU's attention: one token's result is the same to the last bit however the work is cut, on every processor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinpool.kernels.amx import USES_AMX, VARIABLE
from twinpool.kernels.attention_cpu import attend, scratch_size
from twinpool.kernels.jit import compiled, flat
from twinpool.kernels.paged_attention import (
    AttentionParams,
    PagedBatch,
    paged_attention,
    paged_attention_reference,
)

DTYPES = [torch.float32, torch.bfloat16]
# Weights are rounded to bfloat16 before they multiply the values: 2⁻⁹ of each, beside the last rounding of the result.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6}}
WITHOUT_AVX512 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+popcnt"}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def paged_batch(lengths: list[tuple[int, int]], block_size: int, num_blocks: int) -> PagedBatch:
    """Sequences of (all tokens, query tokens); blocks are taken from the last one down, in turn."""
    free = iter(range(num_blocks - 1, -1, -1))
    tables = [[next(free) for _ in range(-(-end // block_size))] for end, _ in lengths]
    nowhere = torch.zeros(0, dtype=torch.int64)
    return PagedBatch(
        query_starts=np.cumsum([0, *(count for _, count in lengths)]),
        ends=np.array([end for end, _ in lengths]),
        block_tables=np.concatenate(tables),
        table_starts=np.cumsum([0, *map(len, tables)]),
        slots=nowhere,
        positions=nowhere,
    )


def run_ranks(
    query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, size: int, function: Any = attend
) -> list[torch.Tensor]:
    """What each of `size` ranks writes; NaN where it writes nothing."""
    outs = []
    needed = scratch_size(query.shape[1], kv.shape[3], kv.shape[5], kv.element_size())
    for rank in range(size):
        out = torch.full(query.shape, float("nan"), dtype=query.dtype)
        function(
            rank, size, flat(query), query.stride(0), query.stride(1), query.shape[1], flat(kv), tuple(kv.shape), 0,
            batch.query_starts, batch.ends, batch.block_tables, batch.table_starts, np.float32(0.2), 0,
            np.float32(0.0), np.full(size * needed, np.nan, np.float32), flat(out),
        )  # fmt: skip
        outs.append(out)
    return outs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (8, 1, 32, 8),
        (3, 3, 80, 24),
        (16, 2, 128, 128),
        (7, 1, 256, 16),
        (10, 5, 2, 16),
        (20, 20, 96, 7),
        (34, 2, 64, 16),
    ],
)
def test_attention_of_every_shape_is_its_formula(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = paged_batch([(200, 1), (1, 1), (150, 150), (129, 2)], block_size, 80)
    kv = torch.randn(80, 1, 2, kv_heads, block_size, head_dim).to(dtype)
    query = torch.randn(int(batch.query_starts[-1]), heads, head_dim).to(dtype)
    params = AttentionParams(head_dim**-0.5)
    wanted = paged_attention_reference(query, kv, 0, batch, params)
    torch.testing.assert_close(paged_attention(query, kv, 0, batch, params), wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "params", [AttentionParams(0.2), AttentionParams(0.2, window=140), AttentionParams(0.2, softcap=4.0)]
)
def test_a_token_attends_alike_in_one_prompt_in_chunks_and_in_decode(
    params: AttentionParams, dtype: torch.dtype
) -> None:
    """Bit for bit, wherever the borders of the chunks are, and whatever else is in the batch."""
    length, heads, kv_heads, head_dim = 300, 6, 2, 64
    kv = torch.randn(40, 1, 2, kv_heads, 16, head_dim).to(dtype)
    query = torch.randn(length, heads, head_dim).to(dtype)
    whole = paged_attention(query, kv, 0, paged_batch([(length, length)], 16, 40), params)
    for borders in ([0, 1, 64, 65, 197, 300], [0, 128, 256, 297, 298, 299, 300]):
        for start, end in pairwise(borders):
            chunk = query[start:end]
            alone = paged_attention(chunk, kv, 0, paged_batch([(end, end - start)], 16, 40), params)
            assert torch.equal(alone, whole[start:end])
            rows = torch.cat((chunk, query[:3], query[:1]))
            beside = paged_batch([(end, end - start), (77, 3), (9, 1)], 16, 40)
            assert torch.equal(paged_attention(rows, kv, 0, beside, params)[: end - start], whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_beyond_a_sequence_in_its_last_block_is_never_read(dtype: torch.dtype) -> None:
    """Another request's KV may lie there still, infinities among it."""
    batch = paged_batch([(200, 1), (1, 1), (150, 150), (129, 2)], 16, 40)
    kv = torch.full((40, 1, 2, 3, 16, 64), float("nan"), dtype=dtype)
    for seq, end in enumerate(batch.ends):
        for position in range(end):
            block = int(batch.table(seq)[position // 16])
            kv[block, 0, :, :, position % 16] = torch.randn(2, 3, 64).to(dtype)
    query = torch.randn(int(batch.query_starts[-1]), 9, 64).to(dtype)
    params = AttentionParams(0.125)
    found = paged_attention(query, kv, 0, batch, params)
    assert torch.equal(found, paged_attention(query, kv.nan_to_num(), 0, batch, params))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 16, 32), (12, 1, 96), (40, 2, 128)]
)
def test_a_token_attends_alike_whether_heads_share_a_column_or_not(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """In decode several heads can be weighed together; of a prompt each has columns of its own. Same to the bit, also
    where one number is far larger than the others and sums have to be scaled again and again."""
    length = 290
    kv = torch.randn(40, 1, 2, kv_heads, 16, head_dim)
    kv[:, :, 0, :, :, ::7] *= torch.rand(40, 1, kv_heads, 16, 1) * 8
    kv = kv.to(dtype)
    query = torch.randn(length, heads, head_dim).to(dtype)
    params = AttentionParams(head_dim**-0.5)
    whole = paged_attention(query, kv, 0, paged_batch([(length, length)], 16, 40), params)
    for end in (1, 2, 16, 17, 33, 127, 128, 129, 160, 161, length):
        alone = paged_attention(query[end - 1 : end], kv, 0, paged_batch([(end, 1)], 16, 40), params)
        assert torch.equal(alone[0], whole[end - 1])
        if end > 3:
            three = paged_attention(query[end - 3 : end], kv, 0, paged_batch([(end, 3)], 16, 40), params)
            assert torch.equal(three, whole[end - 3 : end])


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_write_every_result_once_and_share_the_work(size: int) -> None:
    batch = paged_batch([(250, 1), (90, 90), (9, 1), (120, 1), (130, 128), (60, 1)], 16, 50)
    kv = torch.randn(50, 1, 2, 3, 16, 32).bfloat16()
    query = torch.randn(int(batch.query_starts[-1]), 9, 32).bfloat16()
    (alone,) = run_ranks(query, kv, batch, 1)
    shares = torch.stack(run_ranks(query, kv, batch, size))
    written = ~shares.isnan()
    assert written.sum(dim=0).eq(1).all()
    assert torch.equal(shares.nan_to_num().sum(dim=0), alone)
    assert written.flatten(1).any(dim=1).all()


@compiled
def attend_among_reordered_sums(
    rank: Any, size: Any, query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any,
    layer: Any, query_starts: Any, ends: Any, block_tables: Any, table_starts: Any, scale: Any, window: Any,
    softcap: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    """`attend`, compiled because a function needs it that may reorder sums: it must not inherit that."""
    attend(
        rank, size, query, token_stride, head_stride, num_heads, pool, shape, layer, query_starts, ends, block_tables,
        table_starts, scale, window, softcap, scratch, out,
    )  # fmt: skip


def check_from_another_function() -> None:
    batch = paged_batch([(200, 1), (150, 40), (31, 31)], 16, 40)
    kv = torch.randn(40, 1, 2, 2, 16, 40).bfloat16()
    query = torch.randn(int(batch.query_starts[-1]), 6, 40).bfloat16()
    (found,) = run_ranks(query, kv, batch, 1, attend_among_reordered_sums)
    wanted = paged_attention_reference(query, kv, 0, batch, AttentionParams(0.2))
    torch.testing.assert_close(found, wanted, **TOLERANCE[torch.bfloat16])


def run_this_file(tmp_path: Path, what: str, **variables: str) -> str:
    """What it prints when it runs `what` by itself, compiling for itself: nothing else, as that takes long."""
    environment = os.environ | variables | {"NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, __file__, what]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_a_processor_without_avx512_computes_the_formula_from_any_caller(tmp_path: Path) -> None:
    run_this_file(tmp_path, "check", **WITHOUT_AVX512)


@pytest.mark.skipif(
    not USES_AMX, reason="needs a processor with AMX: elsewhere all tests above run without it"
)
def test_without_tiles_a_token_attends_alike_too(tmp_path: Path) -> None:
    assert run_this_file(tmp_path, "digest", **{VARIABLE: "0"}) != digest_of_results()


def digest_of_results() -> str:
    """Of what a batch gives, checked against its formula and against each token by itself."""
    torch.manual_seed(0)
    kv = torch.randn(20, 1, 2, 2, 16, 64).bfloat16()
    query = torch.randn(150, 6, 64).bfloat16()
    whole = paged_attention(query, kv, 0, paged_batch([(150, 150)], 16, 20), AttentionParams(0.2))
    for end in (1, 129, 150):
        alone = paged_attention(
            query[end - 1 : end], kv, 0, paged_batch([(end, 1)], 16, 20), AttentionParams(0.2)
        )
        assert torch.equal(alone[0], whole[end - 1])
    return hashlib.sha256(flat(whole).tobytes()).hexdigest()


if __name__ == "__main__":
    match sys.argv[1]:
        case "check":
            check_from_another_function()
        case "digest":
            sys.stdout.write(digest_of_results())
