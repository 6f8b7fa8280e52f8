"""A KV pool in 8 bits: floats (e4m3: Micikevicius et al. 2022, arXiv:2209.05433) as they are, or integers with a scale.

Whatever its element type, the pool is seen as kv[block, layer, k|v, kv_head, slot, head_dim]. In an int8 pool a float32
scale per slot lies behind the vectors of each (block, layer, k|v, kv_head), block_size · head_dim bytes further on:
so a block, a layer of it and a head of it stay contiguous, scales included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MOST_FP8 = 448.0
"""The largest e4m3."""
MOST_INT8 = 127.0
LEAST_AMAX = 1e-30
"""Keeps the scale of a vector of zeros above 0."""


def pool_view(memory: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The pool of `shape` [block, layer, k|v, kv_head, slot, head_dim] in `memory`, uint8 and contiguous."""
    if dtype != torch.int8:
        return memory.view(dtype)[: math.prod(shape)].view(*shape)
    block_size, head_dim = shape[-2:]
    strides = [1, head_dim, block_size * (head_dim + 4)]
    for size in reversed(shape[1:4]):
        strides.append(strides[-1] * size)
    return memory.view(dtype).as_strided(tuple(shape), tuple(reversed(strides)))


def int8_scales(kv: torch.Tensor) -> torch.Tensor:
    """The scales of an int8 pool, or of a slice [..., slot, head_dim] of one that has whole slots: float32 [..., slot],
    the same memory."""
    block_size, head_dim = kv.shape[-2:]
    strides = (*(stride // 4 for stride in kv.stride()[:-2]), 1)
    first = (kv.storage_offset() + block_size * head_dim) // 4
    empty = torch.empty(0, dtype=torch.float32, device=kv.device)
    return empty.set_(kv.untyped_storage(), first, kv.shape[:-1], strides)


def quantize(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., head_dim] and scales [...]: vector ≈ int8 · scale, the largest element at ±127."""
    amax = vectors.float().abs().amax(dim=-1).clamp(min=LEAST_AMAX)
    steps = vectors.float() * (amax.new_tensor(MOST_INT8) / amax).unsqueeze(-1)
    return steps.round().to(torch.int8), amax / MOST_INT8


def dequantize(kv: torch.Tensor) -> torch.Tensor:
    """float32 of a pool, or of a slice with whole slots, of any element type."""
    if kv.dtype == torch.int8:
        return kv.float() * int8_scales(kv).unsqueeze(-1)
    return kv.float()
