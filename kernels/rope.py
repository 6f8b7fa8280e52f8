"""Rotary position embedding: (x1, x2) → (x1 cos - x2 sin, x2 cos + x1 sin) (Su et al. 2021, arXiv:2104.09864), on the
pairs (i, i + head_dim / 2), as Llama's published weights expect."""

from __future__ import annotations

from typing import Any

import torch

from twinpool.kernels.jit import compiled, flat, load, runs_compiled, store


def rope_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] rotated; `cos` and `sin` [positions, head_dim / 2] in float32."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


def rope_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotates `x` [tokens, heads, head_dim] in place; `x` may be a slice of wider rows.

    `cos` and `sin` as in the reference, contiguous; `positions` [tokens], int64.
    """
    if not runs_compiled(x):
        x.copy_(rope_reference(x, cos, sin, positions))
        return
    _rotate(
        flat(x),
        flat(cos),
        flat(sin),
        positions.numpy(),
        x.shape[1],
        x.stride(0),
        x.stride(1),
        x.shape[2] // 2,
    )


@compiled
def _rotate(
    x: Any, cos: Any, sin: Any, positions: Any, num_heads: Any, token_stride: Any, head_stride: Any, half: Any
) -> None:
    for token in range(positions.shape[0]):
        angle = positions[token] * half
        c, s = cos[angle : angle + half], sin[angle : angle + half]
        for head in range(num_heads):
            start = token * token_stride + head * head_stride
            first, second = x[start : start + half], x[start + half : start + 2 * half]
            for i in range(half):
                a, b = load(first, i), load(second, i)
                store(first, i, a * c[i] - b * s[i])
                store(second, i, b * c[i] + a * s[i])
