"""Between the fused query, key and value map and attention, on a GPU: norm of heads, rotary embedding and the write of
keys and values to the pool, in one launch that reads each row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinpool.kernels.gpu.kv_format import cells_of, kv_format, raw, store_scales
from twinpool.kernels.gpu.variant import Variant


def rope_kv_write_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """As `twinpool.kernels.rope_kv_write.rope_kv_write_`; the key rows of `qkv` stay as they were."""
    tokens, rows, head_dim = qkv.shape
    num_kv_heads, block_size = kv.shape[3:5]
    if tokens == 0:
        return
    norms = query_norm is not None and key_norm is not None
    half = triton.next_power_of_2(head_dim // 2)
    heads = _heads_at_once(half)
    _rope_kv_write[(tokens, triton.cdiv(rows, heads))](
        qkv, cos, sin, positions, slots, raw(kv), query_norm if norms else qkv, key_norm if norms else qkv, eps,
        qkv.stride(0), *kv.stride()[:4], layer, NUM_HEADS=rows - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, FORMAT=kv_format(kv), NORMS=norms, HEADS=heads,
        HALF=half, num_warps=4,
    )  # fmt: skip


def _heads_at_once(half: int) -> int:
    """So many that each of 128 threads has four elements of either half: loads of 8 bytes in a 16-bit type."""
    return max(1, 512 // half)


@triton.jit(do_not_specialize=["layer"])
def _rope_kv_write(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, slots: tl.tensor, kv: tl.tensor,
    query_norm: tl.tensor, key_norm: tl.tensor, eps: tl.tensor, token_stride: tl.tensor, block_stride: tl.tensor,
    layer_stride: tl.tensor, side_stride: tl.tensor, head_stride: tl.tensor, layer: tl.tensor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr, NORMS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF)[None, :]
    in_half = i < HEAD_DIM // 2
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    is_query = head < NUM_HEADS
    rotates = head < NUM_HEADS + NUM_KV_HEADS
    source = qkv + token * token_stride + head * HEAD_DIM + i
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        normed = _normed(first * scale, query_norm + i, key_norm + i, is_query, in_half)
        first = tl.where(rotates, normed, first)
        other = i + HEAD_DIM // 2
        normed = _normed(second * scale, query_norm + other, key_norm + other, is_query, in_half)
        second = tl.where(rotates, normed, second)
    angle = tl.load(positions + token) * (HEAD_DIM // 2) + i
    c = tl.where(rotates, tl.load(cos + angle, mask=in_half, other=1.0), 1.0)
    s = tl.where(rotates, tl.load(sin + angle, mask=in_half, other=0.0), 0.0)
    turned_first, turned_second = first * c - second * s, second * c + first * s
    tl.store(source, turned_first.to(qkv.dtype.element_ty), mask=inside & is_query)
    tl.store(source + HEAD_DIM // 2, turned_second.to(qkv.dtype.element_ty), mask=inside & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    kept = head - NUM_HEADS  # which row of the token's KV: its keys, then its values
    writes = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (kept >= 0) & (slot >= 0)
    planes = kv + slot // BLOCK_SIZE * block_stride + layer * layer_stride
    planes += kept // NUM_KV_HEADS * side_stride + kept % NUM_KV_HEADS * head_stride
    within = slot % BLOCK_SIZE
    target = planes + within * HEAD_DIM + i
    amax = tl.maximum(tl.max(tl.abs(turned_first), 1), tl.max(tl.abs(turned_second), 1))[:, None]
    first_cells = cells_of(turned_first, amax, FORMAT, kv.dtype.element_ty)
    second_cells = cells_of(turned_second, amax, FORMAT, kv.dtype.element_ty)
    tl.store(target, first_cells, mask=writes & in_half)
    tl.store(target + HEAD_DIM // 2, second_cells, mask=writes & in_half)
    if FORMAT == "int8":
        store_scales(planes, within, amax, writes, BLOCK_SIZE, HEAD_DIM)


@triton.jit
def _normed(
    scaled: tl.tensor, query_norm: tl.tensor, key_norm: tl.tensor, is_query: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """Times the weights of its kind of head, rounded as if it had been stored before it rotates."""
    of_query = tl.load(query_norm, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm, mask=inside, other=0.0).to(tl.float32)
    weighted = scaled * tl.where(is_query, of_query, of_key)
    return weighted.to(query_norm.dtype.element_ty).to(tl.float32)


def _variant(dtype: str, head_dim: int, norms: bool, pool: str) -> Variant:
    half = triton.next_power_of_2(head_dim // 2)
    pointers = dict.fromkeys(("qkv", "query_norm", "key_norm"), f"*{dtype}")
    pointers["kv"] = {"plain": f"*{dtype}", "fp8": "*u8", "int8": "*i8"}[pool]
    tables = dict.fromkeys(("cos", "sin"), "*fp32") | dict.fromkeys(("positions", "slots"), "*i64")
    strides = ("token_stride", "block_stride", "layer_stride", "side_stride", "head_stride")
    sizes = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "BLOCK_SIZE": 16, "HEAD_DIM": head_dim, "FORMAT": pool}
    return Variant(
        _rope_kv_write,
        f"{dtype}, heads of {head_dim}" + ", normed" * norms + f", {pool}" * (pool != "plain"),
        pointers | tables | {"eps": "fp32"} | dict.fromkeys((*strides, "layer"), "i32"),
        sizes | {"NORMS": norms, "HEADS": _heads_at_once(half), "HALF": half},
        strides,
    )


VARIANTS = tuple(
    _variant(dtype, *shape)
    for dtype in ("bf16", "fp16", "fp32")
    for shape in ((64, False, "plain"), (96, False, "int8"), (128, True, "fp8"), (256, False, "plain"))
)
