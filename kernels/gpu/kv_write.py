"""Writing new keys and values into their slots on a GPU, for models whose own code rotates them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinpool.kernels.gpu.kv_format import cells_of, kv_format, raw, store_scales
from twinpool.kernels.gpu.variant import Variant


def kv_write(kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """As `twinpool.kernels.kv_write.kv_write`, for one layer of the pool: [block, k|v, kv_head, slot, head_dim]."""
    tokens, num_kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    _write[(tokens, num_kv_heads)](
        key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1), slots, raw(kv),
        *kv.stride()[:3], BLOCK_SIZE=kv.shape[3], HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim),
        FORMAT=kv_format(kv), num_warps=1,
    )  # fmt: skip


@triton.jit
def _write(
    key: tl.tensor, key_token_stride: tl.tensor, key_head_stride: tl.tensor, value: tl.tensor,
    value_token_stride: tl.tensor, value_head_stride: tl.tensor, slots: tl.tensor, pool: tl.tensor,
    block_stride: tl.tensor, side_stride: tl.tensor, head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr,
) -> None:  # fmt: skip
    """The key and value of one token for one head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    plane = pool + slot // BLOCK_SIZE * block_stride + head * head_stride
    within = slot % BLOCK_SIZE
    from_key = key + token * key_token_stride + head * key_head_stride
    from_value = value + token * value_token_stride + head * value_head_stride
    _store(plane, within, from_key, BLOCK_SIZE, HEAD_DIM, DIM, FORMAT)
    _store(plane + side_stride, within, from_value, BLOCK_SIZE, HEAD_DIM, DIM, FORMAT)


@triton.jit
def _store(
    plane: tl.tensor, slot: tl.tensor, vector: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr,
) -> None:  # fmt: skip
    d = tl.arange(0, DIM)
    mask = d < HEAD_DIM
    numbers = tl.load(vector + d, mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(numbers), axis=0)
    cells = cells_of(numbers, amax, FORMAT, plane.dtype.element_ty)
    tl.store(plane + slot * HEAD_DIM + d, cells, mask=mask)
    if FORMAT == "int8":
        store_scales(plane, slot, amax, slot >= 0, BLOCK_SIZE, HEAD_DIM)


def _variant(dtype: str, head_dim: int, pool: str) -> Variant:
    strides = ("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride")
    pool_strides = ("block_stride", "side_stride", "head_stride")
    return Variant(
        _write,
        f"{dtype} head {head_dim} {pool}",
        dict.fromkeys(("key", "value"), f"*{dtype}")
        | {"slots": "*i64", "pool": {"plain": f"*{dtype}", "fp8": "*u8", "int8": "*i8"}[pool]}
        | dict.fromkeys((*strides, *pool_strides), "i32"),
        {
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "DIM": triton.next_power_of_2(head_dim),
            "FORMAT": pool,
        },
        (*strides, *pool_strides),
        num_warps=1,
    )


VARIANTS = (_variant("bf16", 128, "plain"), _variant("fp16", 80, "fp8"), _variant("bf16", 64, "int8"))
