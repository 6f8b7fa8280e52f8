"""Paged attention on a GPU, checked against `kernels/paged_attention.py`: an online softmax over tiles of keys that are
read through the block table (Dao et al. 2022, arXiv:2205.14135; Kwon et al. 2023, arXiv:2309.06180).

A program works for one sequence and one key/value head, and its query rows are all query heads that share it, so each
key and value is read once for the group. Decode splits a sequence's keys over several programs, whose partial outputs
merge exactly by their log-sum-exp (Dao et al. 2023, "Flash-Decoding for long-context inference"). How many there are is
decided by what the host knows; where they begin and end by what the device knows, so launches never wait for lengths.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from twinpool.kernels.gpu.batch import DeviceBatch
from twinpool.kernels.gpu.kv_format import kv_format, load_kv, load_scales, raw
from twinpool.kernels.gpu.variant import Variant
from twinpool.kernels.paged_attention import AttentionParams

LEAST_SPLIT = 256
"""Keys below which a split costs more than it saves, as the partial outputs are written and read again."""
MOST_SPLITS = 128
_PROGRAMS_PER_SM = 4
_DECODE_WARPS = 4
_DECODE_STAGES = 5
"""The table's entry, and two tiles of keys and values that it points to, are on their way while one is worked on."""
_LOG2E = tl.constexpr(math.log2(math.e))
_LEAST_ROWS = 16
"""The fewest rows that the tensor cores multiply."""
_MERGED_AT_ONCE = tl.constexpr(8)
_NONE = tl.constexpr(-1.0e30)
"""The score of a key that a query does not see. Weights of a row that has seen no key yet are void: the first key
scales them by exp(_NONE - its score) = 0."""
_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def paged_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: DeviceBatch,
    params: AttentionParams,
    num_sms: int | None = None,
) -> torch.Tensor:
    """Attention of every query of the batch over its own sequence.

    `query` [tokens, heads, head_dim] may be a slice of wider rows; `kv` [block, k|v, kv_head, slot, head_dim] is one
    layer of the pool. Returns [tokens, heads, head_dim], contiguous, undefined in rows of padding. Waits for nothing.
    Decodes are split for `num_sms` multiprocessors (None: as many as the device has).
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch.num_decodes:
        context = batch.block_tables.shape[1] * kv.shape[3]
        programs = batch.num_decodes * kv.shape[2]
        num_sms = _num_sms(query.device) if num_sms is None else num_sms
        attend_decodes(query, kv, batch, params, out, num_splits(programs, context, num_sms))
    if batch.num_seqs > batch.num_decodes:
        attend_chunks(query, kv, batch, params, out)
    return out


def num_splits(num_programs: int, most_context: int, num_sms: int) -> int:
    """Into how many parts each sequence's keys are split: enough that `num_programs`, the (sequence, key/value head)
    pairs, fill the GPU; no more than sequences of `most_context` tokens can use."""
    wanted = -(-_PROGRAMS_PER_SM * num_sms // num_programs)
    useful = -(-most_context // LEAST_SPLIT)
    return min(wanted, useful, MOST_SPLITS)


def attend_decodes(
    query: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, params: AttentionParams, out: torch.Tensor, splits: int
) -> None:  # fmt: skip
    """The batch's first `num_decodes` rows, into `out`; each sequence's keys in up to `splits` parts."""
    num_seqs, num_heads, num_kv_heads = batch.num_decodes, query.shape[1], kv.shape[2]
    constants = _constants(query, kv, params)
    partial, lse = out, out
    if splits > 1:
        shape = (num_seqs, num_heads, splits)
        partial = torch.empty((*shape, kv.shape[4]), dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    _decode[(num_seqs, num_kv_heads, splits)](
        query, query.stride(0), query.stride(1), raw(kv), kv.stride(0), kv.stride(1), kv.stride(2),
        batch.block_tables, batch.block_tables.stride(0), batch.ends, partial, lse, params.scale,
        **constants, ROWS=decode_rows(constants["GROUP"]), KEYS=decode_keys(constants["DIM"], query.dtype),
        LEAST=LEAST_SPLIT, WHOLE=splits == 1, num_warps=_DECODE_WARPS, num_stages=_DECODE_STAGES,
    )  # fmt: skip
    if splits > 1:
        _merge[(num_seqs, num_heads)](
            partial, lse, batch.ends, splits, out, HEAD_DIM=constants["HEAD_DIM"], DIM=constants["DIM"],
            WINDOW=constants["WINDOW"], LEAST=LEAST_SPLIT, MOST=MOST_SPLITS, num_warps=4,
        )  # fmt: skip


def attend_chunks(
    query: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, params: AttentionParams, out: torch.Tensor
) -> None:
    """All rows behind the batch's decodes, into `out`."""
    constants = _constants(query, kv, params)
    rows, keys, warps, stages = chunk_tiles(
        constants["DIM"], constants["GROUP"], query.dtype, constants["FORMAT"]
    )
    tiles = -(-batch.most_queries // (rows // constants["GROUP"]))
    _chunk[(tiles, kv.shape[2], batch.num_seqs - batch.num_decodes)](
        query, query.stride(0), query.stride(1), raw(kv), kv.stride(0), kv.stride(1), kv.stride(2),
        batch.block_tables, batch.block_tables.stride(0), batch.ends, batch.query_starts, batch.num_decodes, out,
        params.scale, **constants, ROWS=rows, KEYS=keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def decode_rows(group: int) -> int:
    """Rows per tile of decode: the query heads of a group."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(group)))


def decode_keys(dim: int, dtype: torch.dtype) -> int:
    """Keys per step of decode: a tile of them in `dtype` takes 16 KiB of shared memory at most."""
    return max(16, min(64, 16384 // (dim * dtype.itemsize)))


def chunk_tiles(dim: int, group: int, dtype: torch.dtype, kv_format: str) -> tuple[int, int, int, int]:
    """Rows and keys per tile, warps, and stages of the pipeline, for chunks. Tiles as large as spill nowhere, but for
    small heads: models that have them are small, and large tiles of a chunk would not fill a GPU."""
    if dtype == torch.float32:
        rows, keys, warps, stages = 32, 32, 4, 2
    elif dim > 128:
        rows, keys, warps, stages = 64, 32, 8, 2
    elif kv_format == "plain" and dim <= 64:
        rows, keys, warps, stages = 64, 64, 4, 3
    elif kv_format == "plain":
        rows, keys, warps, stages = 128, 64, 8, 3
    else:
        rows, keys, warps, stages = 128, 32, 8, 2
    return max(rows, triton.next_power_of_2(group)), keys, warps, stages


def _constants(query: torch.Tensor, kv: torch.Tensor, params: AttentionParams) -> dict[str, Any]:
    head_dim = query.shape[2]
    # Triton's interpreter multiplies the bits of bfloat16, so there it is widened.
    exact = query.dtype == torch.bfloat16 and not query.is_cuda
    return {
        "WINDOW": params.window or 0,
        "SOFTCAP": params.softcap or 0.0,
        "HEAD_DIM": head_dim,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "GROUP": query.shape[1] // kv.shape[2],
        "BLOCK_SIZE": kv.shape[3],
        "FORMAT": kv_format(kv),
        "DOT": tl.float32 if exact else _DOT[query.dtype],
    }


@functools.cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _step(
    query: tl.tensor, at: tl.tensor, first: tl.tensor, stop: tl.tensor, table: tl.tensor, keys: tl.tensor,
    block_stride: tl.tensor, value_offset: tl.tensor, factor: tl.tensor, cap: tl.tensor, total: tl.tensor,
    peak: tl.tensor, mass: tl.tensor, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One step of the online softmax, in powers of two: the keys [first, first + KEYS) that lie before `stop`.

    `query` [rows, DIM] stands `at` [rows]; `keys` points at slot 0 of this head in block 0, values lie `value_offset`
    further on; scores are times `factor` (and then bounded: `cap`). Without MASKED, all rows see all the keys.
    """
    j = first + tl.arange(0, KEYS)
    there = j < stop
    d = tl.arange(0, DIM)
    slot = j % BLOCK_SIZE
    block = tl.load(table + j // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    planes = keys + block * block_stride
    cells = planes[:, None] + (slot * HEAD_DIM)[:, None] + d[None, :]
    mask = there[:, None] & (d < HEAD_DIM)[None, :]
    key = load_kv(cells, mask, FORMAT, DOT)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if FORMAT == "int8":
        scores *= load_scales(planes, slot, there, BLOCK_SIZE, HEAD_DIM)[None, :]
    scores *= factor
    if SOFTCAP > 0.0:
        # cap · tanh(x) = cap - 2 · cap / (1 + exp(2x)); `factor` holds 2 · log2(e) / softcap.
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))
    if MASKED:
        seen = there[None, :] & (j[None, :] <= at[:, None])
        if WINDOW > 0:
            seen &= j[None, :] > at[:, None] - WINDOW
        scores = tl.where(seen, scores, _NONE)
    highest = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(peak - highest)
    mass = mass * shrink + tl.sum(weights, axis=1)
    value = load_kv(cells + value_offset, mask, FORMAT, DOT)
    if FORMAT == "int8":
        weights *= load_scales(planes + value_offset, slot, there, BLOCK_SIZE, HEAD_DIM)[None, :]
    total = tl.dot(weights.to(DOT), value, total * shrink[:, None], input_precision="ieee")
    return total, highest, mass


@triton.jit
def _factor_and_cap(scale: tl.tensor, SOFTCAP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """What `_step` multiplies scores by, and its bound of them, for exponents of 2."""
    if SOFTCAP > 0.0:
        return scale * (2.0 * _LOG2E / SOFTCAP), SOFTCAP * _LOG2E
    return scale * _LOG2E, 0.0


@triton.jit
def _part(
    end: tl.tensor, splits: tl.tensor, WINDOW: tl.constexpr, LEAST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The first key that a decode of `end` tokens sees, and the keys of each of its parts."""
    first = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0 * end
    each = tl.cdiv(tl.cdiv(end - first, splits), LEAST) * LEAST
    return first, each


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    query: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, pool: tl.tensor, block_stride: tl.tensor,
    value_offset: tl.tensor, kv_head_stride: tl.tensor, tables: tl.tensor, table_stride: tl.tensor, ends: tl.tensor,
    partial: tl.tensor, lse: tl.tensor, scale: tl.tensor,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LEAST: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """One part of one sequence for one key/value head: into `partial` [seqs, heads, splits, HEAD_DIM] and `lse` [seqs,
    heads, splits] (to the base 2), or, if that is the WHOLE, into the output, which is then what `partial` is."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    end = tl.load(ends + seq)
    seen_from, each = _part(end, splits, WINDOW, LEAST)
    start = seen_from + split * each
    if start >= end:
        return
    stop = tl.minimum(start + each, end)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    head = kv_head * GROUP + row
    mask = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    from_rows = query + seq.to(tl.int64) * token_stride + head[:, None] * head_stride + d[None, :]
    q = tl.load(from_rows, mask=mask, other=0.0).to(DOT)
    factor, cap = _factor_and_cap(scale, SOFTCAP)
    table = tables + seq.to(tl.int64) * table_stride
    keys = pool + kv_head * kv_head_stride
    at = tl.zeros([ROWS], tl.int32) + (end - 1)
    total = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], _NONE, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    for first in range(start, stop, KEYS):
        total, peak, mass = _step(
            q, at, first, stop, table, keys, block_stride, value_offset, factor, cap, total, peak, mass,
            True, 0, SOFTCAP, HEAD_DIM, DIM, BLOCK_SIZE, FORMAT, DOT, KEYS,
        )  # fmt: skip
    total = total / mass[:, None]
    part = (seq.to(tl.int64) * tl.num_programs(1) * GROUP + head) * splits + split
    to_rows = partial + part[:, None] * HEAD_DIM + d[None, :]
    tl.store(to_rows, total.to(partial.dtype.element_ty), mask=mask)
    if not WHOLE:
        tl.store(lse + part, peak + tl.log2(mass), mask=row < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial: tl.tensor, lse: tl.tensor, ends: tl.tensor, splits: tl.tensor, out: tl.tensor,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    """The parts of one row: each counts by the sum of its exponentials. MOST bounds `splits`."""
    seq, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(ends + seq)
    if end == 0:
        return
    seen_from, each = _part(end, splits, WINDOW, LEAST)
    used = tl.cdiv(end - seen_from, each)
    row = seq.to(tl.int64) * tl.num_programs(1) + head
    every = tl.arange(0, MOST)
    sums = tl.load(lse + row * splits + every, mask=every < used, other=_NONE)
    peak = tl.max(sums, axis=0)
    mass = tl.sum(tl.exp2(sums - peak), axis=0)
    d = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for first in range(0, used, _MERGED_AT_ONCE):
        split = first + tl.arange(0, _MERGED_AT_ONCE)
        there = split < used
        shares = tl.exp2(tl.load(lse + row * splits + split, mask=there, other=_NONE) - peak) / mass
        rows = partial + (row * splits + split)[:, None] * HEAD_DIM + d[None, :]
        parts = tl.load(rows, mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        total += tl.sum(parts * shares[:, None], axis=0)
    tl.store(out + row * HEAD_DIM + d, total.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride", "first_seq"])
def _chunk(
    query: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, pool: tl.tensor, block_stride: tl.tensor,
    value_offset: tl.tensor, kv_head_stride: tl.tensor, tables: tl.tensor, table_stride: tl.tensor, ends: tl.tensor,
    query_starts: tl.tensor, first_seq: tl.tensor, out: tl.tensor, scale: tl.tensor,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of ROWS // GROUP consecutive queries of one sequence for one key/value head; rows are ordered by token,
    then query head of the group."""
    # The last tile sees the most keys, so it starts first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, seq = tl.program_id(1), tl.program_id(2) + first_seq
    first_row = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - first_row
    end = tl.load(ends + seq)
    tokens = ROWS // GROUP
    first_token = tile * tokens
    if (end == 0) | (first_token >= count):
        return
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    mask = ((row < tokens * GROUP) & (token < count))[:, None] & (d < HEAD_DIM)[None, :]
    token_row = (first_row + token).to(tl.int64)
    from_rows = query + token_row[:, None] * token_stride + head[:, None] * head_stride + d[None, :]
    q = tl.load(from_rows, mask=mask, other=0.0).to(DOT)
    factor, cap = _factor_and_cap(scale, SOFTCAP)
    table = tables + seq.to(tl.int64) * table_stride
    keys = pool + kv_head * kv_head_stride
    position = end - count + first_token
    at = position + row // GROUP
    stop = tl.minimum(position + tokens, end)
    total = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], _NONE, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    if WINDOW > 0:
        border = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    else:
        border = (position + 1) // KEYS * KEYS
        for first in range(0, border, KEYS):
            total, peak, mass = _step(
                q, at, first, stop, table, keys, block_stride, value_offset, factor, cap, total, peak, mass,
                False, WINDOW, SOFTCAP, HEAD_DIM, DIM, BLOCK_SIZE, FORMAT, DOT, KEYS,
            )  # fmt: skip
    for first in range(border, stop, KEYS):
        total, peak, mass = _step(
            q, at, first, stop, table, keys, block_stride, value_offset, factor, cap, total, peak, mass,
            True, WINDOW, SOFTCAP, HEAD_DIM, DIM, BLOCK_SIZE, FORMAT, DOT, KEYS,
        )  # fmt: skip
    total = total / mass[:, None]
    heads = tl.num_programs(1) * GROUP
    to_rows = out + (token_row * heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(to_rows, total.to(out.dtype.element_ty), mask=mask)


def _variants_of(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, pool: str, window: int, softcap: float
) -> tuple[Variant, ...]:
    type_ = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    dim = triton.next_power_of_2(head_dim)
    label = f"{type_} head {head_dim} group {group} block {block_size}"
    label += f" {pool}" * (pool != "plain") + " window" * (window > 0) + " softcap" * (softcap > 0)
    divisible = ("token_stride", "head_stride", "block_stride", "value_offset", "kv_head_stride")
    pointers = {"query": f"*{type_}", "pool": {"plain": f"*{type_}", "fp8": "*u8", "int8": "*i8"}[pool]}
    pointers |= dict.fromkeys(("tables", "ends"), "*i32")
    shared = pointers | {"scale": "fp32"} | dict.fromkeys((*divisible, "table_stride"), "i32")
    constants = {
        "WINDOW": window, "SOFTCAP": softcap, "HEAD_DIM": head_dim, "DIM": dim, "GROUP": group,
        "BLOCK_SIZE": block_size, "FORMAT": pool, "DOT": _DOT[dtype],
    }  # fmt: skip
    rows, keys, warps, stages = chunk_tiles(dim, group, dtype, pool)
    of_decode = {
        "ROWS": decode_rows(group),
        "KEYS": decode_keys(dim, dtype),
        "LEAST": LEAST_SPLIT,
        "WHOLE": False,
    }
    decode = Variant(
        _decode, label, {**shared, "partial": "*fp32", "lse": "*fp32"}, {**constants, **of_decode}, divisible,
        _DECODE_WARPS, _DECODE_STAGES,
    )  # fmt: skip
    merge = Variant(
        _merge, label, {"partial": "*fp32", "lse": "*fp32", "ends": "*i32", "splits": "i32", "out": f"*{type_}"},
        {"HEAD_DIM": head_dim, "DIM": dim, "WINDOW": window, "LEAST": LEAST_SPLIT, "MOST": MOST_SPLITS},
    )  # fmt: skip
    chunk = Variant(
        _chunk, label, {**shared, "query_starts": "*i32", "first_seq": "i32", "out": f"*{type_}"},
        {**constants, "ROWS": rows, "KEYS": keys}, divisible, warps, stages,
    )  # fmt: skip
    return decode, merge, chunk


VARIANTS = (
    *_variants_of(torch.bfloat16, 64, 3, 16, "plain", 0, 0.0),
    *_variants_of(torch.bfloat16, 128, 8, 16, "plain", 0, 0.0),
    *_variants_of(torch.bfloat16, 128, 4, 128, "fp8", 0, 0.0),
    *_variants_of(torch.float16, 80, 1, 32, "int8", 4096, 0.0),
    *_variants_of(torch.bfloat16, 256, 2, 64, "plain", 4096, 50.0),
    *_variants_of(torch.float32, 64, 7, 16, "plain", 0, 0.0),
)
