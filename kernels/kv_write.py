"""Writing new keys and values into their slots of the paged pool."""

from __future__ import annotations

from typing import Any

import torch

from twinpool.kernels.jit import compiled, flat, runs_compiled
from twinpool.kernels.quantized_kv import MOST_FP8, int8_scales, quantize


def kv_write_reference(
    kv: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """kv[slot // block_size, layer, k|v, :, slot % block_size] = key|value, for each token."""
    block_size = kv.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    for side, vectors in enumerate((key, value)):
        if kv.dtype == torch.int8:
            steps, scales = quantize(vectors)
            kv[blocks, layer, side, :, offsets] = steps
            int8_scales(kv)[blocks, layer, side, :, offsets] = scales
        elif kv.dtype == torch.float8_e4m3fn:
            cells = vectors.float().clamp(-MOST_FP8, MOST_FP8).to(kv.dtype)
            kv.view(torch.uint8)[blocks, layer, side, :, offsets] = cells.view(torch.uint8)
        else:
            kv[blocks, layer, side, :, offsets] = vectors


def kv_write(
    kv: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes in place.

    `kv` is the pool, [block, layer, k|v, kv_head, slot, head_dim], contiguous. `key` and `value`, [tokens, kv_heads,
    head_dim], may be slices of wider rows. `slots` [tokens], int64, counts slots over the pool: block · block_size +
    offset. An 8-bit pool (`kernels/quantized_kv.py`) gets the nearest that it can hold. On a GPU a negative slot is
    padding: nothing is written for it.
    """
    if kv.is_cuda:
        from twinpool.kernels.gpu import kv_write as gpu

        gpu.kv_write(kv[:, layer], key, value, slots)
        return
    if not runs_compiled(kv):
        kv_write_reference(kv, layer, key, value, slots)
        return
    _write(
        flat(kv), kv.stride(), layer, flat(key), key.stride(), flat(value), value.stride(), slots.numpy(),
        key.shape[1], kv.shape[4],
    )  # fmt: skip


@compiled
def _write(
    pool: Any, strides: Any, layer: Any, key: Any, key_strides: Any, value: Any, value_strides: Any,
    slots: Any, num_heads: Any, block_size: Any,
) -> None:  # fmt: skip
    width = strides[4]
    for token in range(slots.shape[0]):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_heads):
            to_key = block * strides[0] + layer * strides[1] + head * strides[3] + offset * width
            to_value = to_key + strides[2]
            from_key = token * key_strides[0] + head * key_strides[1]
            from_value = token * value_strides[0] + head * value_strides[1]
            pool[to_key : to_key + width] = key[from_key : from_key + width]
            pool[to_value : to_value + width] = value[from_value : from_value + width]
