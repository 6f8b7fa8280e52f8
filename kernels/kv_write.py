"""Writing new keys and values into their slots of the paged pool."""

from __future__ import annotations

from typing import Any

import torch

from twinpool.kernels.jit import compiled, flat, runs_compiled


def kv_write_reference(
    kv: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """kv[slot // block_size, layer, k|v, :, slot % block_size] = key|value, for each token."""
    block_size = kv.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, layer, 0, :, offsets] = key
    kv[blocks, layer, 1, :, offsets] = value


def kv_write(
    kv: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes in place.

    `kv` is the pool, [block, layer, k|v, kv_head, slot, head_dim], contiguous. `key` and `value`, both [tokens, kv_heads,
    head_dim] with the same strides, may be slices of wider rows. `slots` [tokens], int64, counts slots over the pool:
    block · block_size + offset.
    """
    if not runs_compiled(kv):
        kv_write_reference(kv, layer, key, value, slots)
        return
    block_size, width = kv.shape[4:]
    _write(
        flat(kv), kv.stride(0), layer * kv.stride(1), flat(key), flat(value), key.stride(0), key.stride(1),
        slots.numpy(), key.shape[1], block_size, width,
    )  # fmt: skip


@compiled
def _write(
    pool: Any, block_stride: Any, layer_start: Any, key: Any, value: Any, token_stride: Any, head_stride: Any,
    slots: Any, num_heads: Any, block_size: Any, width: Any,
) -> None:  # fmt: skip
    for token in range(slots.shape[0]):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_heads):
            source = token * token_stride + head * head_stride
            to_key = block * block_stride + layer_start + (head * block_size + offset) * width
            to_value = to_key + num_heads * block_size * width
            pool[to_key : to_key + width] = key[source : source + width]
            pool[to_value : to_value + width] = value[source : source + width]
