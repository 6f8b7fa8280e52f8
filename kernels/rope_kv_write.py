"""What stands between the fused query, key and value map and attention: the norm of heads that some families have, the
rotary embedding of queries and keys, and the write of keys and values into their slots of the paged pool."""

from __future__ import annotations

import torch

from twinpool.kernels.kv_write import kv_write
from twinpool.kernels.rms_norm import rms_norm_heads_
from twinpool.kernels.rope import rope_


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
    is undefined. `cos`, `sin` and `positions` as `rope_` has them, `kv` and `slots` as `kv_write`. On a GPU a negative
    slot is padding: nothing is written for it.
    """
    if qkv.is_cuda:
        from twinpool.kernels.gpu import rope_kv_write as gpu

        gpu.rope_kv_write_(qkv, cos, sin, positions, kv, layer, slots, query_norm, key_norm, eps)
        return
    num_kv_heads = kv.shape[3]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query, key, value = qkv[:, :num_heads], qkv[:, num_heads:-num_kv_heads], qkv[:, -num_kv_heads:]
    if query_norm is not None and key_norm is not None:
        rms_norm_heads_(query, query_norm, eps)
        rms_norm_heads_(key, key_norm, eps)
    rope_(qkv[:, :-num_kv_heads], cos, sin, positions)
    kv_write(kv, layer, key, value, slots)
