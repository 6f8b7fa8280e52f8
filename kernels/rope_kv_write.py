"""What stands between the fused query, key and value map and attention: the norm of heads that some families have, the
rotary embedding of queries and keys, and the write of keys and values into their slots of the paged pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from twinpool.kernels.jit import compiled, flat, load, runs_compiled, store
from twinpool.kernels.kv_write import kv_write_reference
from twinpool.kernels.rms_norm import norm_rows, rms_norm_reference
from twinpool.kernels.rope import rope_reference


def rope_kv_write_reference(
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
    """As `rope_kv_write_`, without padding; one operation after the other."""
    num_kv_heads = kv.shape[3]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query, key, value = qkv[:, :num_heads], qkv[:, num_heads:-num_kv_heads], qkv[:, -num_kv_heads:]
    if query_norm is not None and key_norm is not None:
        query.copy_(rms_norm_reference(query, query_norm, eps))
        key = rms_norm_reference(key, key_norm, eps)
    query.copy_(rope_reference(query, cos, sin, positions))
    kv_write_reference(kv, layer, rope_reference(key, cos, sin, positions), value, slots)


def rope_kv_write_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norms (with `query_norm` and `key_norm` [head_dim], both or none) and rotates the queries in place, and writes
    normed and rotated keys, and values, to `layer` of the pool `kv`.

    `qkv` [tokens, heads + 2 · kv_heads, head_dim], contiguous: queries, keys, values. What its key rows hold afterwards
    is undefined. `cos`, `sin` and `positions` as `rope_reference` has them, contiguous; `kv` and `slots` as `kv_write`.
    On a GPU a negative slot is padding: nothing is written for it.
    """
    if qkv.is_cuda:
        from twinpool.kernels.gpu import rope_kv_write as gpu

        gpu.rope_kv_write_(qkv, cos, sin, positions, kv, layer, slots, query_norm, key_norm, eps)
        return
    if not runs_compiled(qkv) or kv.dtype != qkv.dtype:
        rope_kv_write_reference(qkv, cos, sin, positions, kv, layer, slots, query_norm, key_norm, eps)
        return
    num_kv_heads = kv.shape[3]
    norms = [flat(qkv)[:0] if norm is None else flat(norm) for norm in (query_norm, key_norm)]
    rope_kv_write_rows(
        flat(qkv), qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, norms[0], norms[1], np.float32(eps), flat(cos),
        flat(sin), positions.numpy(), flat(kv), kv.stride(), layer, slots.numpy(),
    )  # fmt: skip


@compiled
def rope_kv_write_rows(
    qkv: Any, num_heads: Any, num_kv_heads: Any, query_norm: Any, key_norm: Any, eps: Any, cos: Any, sin: Any,
    positions: Any, pool: Any, strides: Any, layer: Any, slots: Any,
) -> None:  # fmt: skip
    """As `rope_kv_write_`, in one pass over the tokens of `positions`, on flat arrays; empty norms are none.

    `strides` are the pool's.
    """
    head_dim = strides[4]
    half, width = head_dim // 2, (num_heads + 2 * num_kv_heads) * head_dim
    for token in range(positions.shape[0]):
        angle = positions[token] * half
        c, s = cos[angle : angle + half], sin[angle : angle + half]
        block_size = strides[3] // head_dim
        slot = (
            slots[token] // block_size * strides[0]
            + layer * strides[1]
            + slots[token] % block_size * head_dim
        )
        for head in range(num_heads + num_kv_heads):
            start = token * width + head * head_dim
            x = qkv[start : start + head_dim]
            if query_norm.shape[0] > 0:
                norm_rows(x, query_norm if head < num_heads else key_norm, eps, x, 1, 1, head_dim, head_dim)
            if head < num_heads:
                _rotate(x, c, s, x, half)
            else:
                key = slot + (head - num_heads) * strides[3]
                _rotate(x, c, s, pool[key : key + head_dim], half)
        for head in range(num_kv_heads):
            source = token * width + (num_heads + num_kv_heads + head) * head_dim
            target = slot + strides[2] + head * strides[3]
            for i in range(head_dim):
                pool[target + i] = qkv[source + i]


@compiled
def _rotate(x: Any, cos: Any, sin: Any, out: Any, half: Any) -> None:
    first, second, rotated, turned = x[:half], x[half:], out[:half], out[half:]
    for i in range(half):
        a, b = load(first, i), load(second, i)
        store(rotated, i, a * cos[i] - b * sin[i])
        store(turned, i, b * cos[i] + a * sin[i])
