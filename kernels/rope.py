"""Rotary position embedding: (x1, x2) → (x1 cos - x2 sin, x2 cos + x1 sin) (Su et al. 2021, arXiv:2104.09864), on the
pairs (i, i + head_dim / 2), as Llama's published weights expect. The kernels of `rope_kv_write.py` do it on the way."""

from __future__ import annotations

import torch


def rope_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] rotated; `cos` and `sin` [positions, head_dim / 2] in float32, `positions`
    [tokens], int64."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
