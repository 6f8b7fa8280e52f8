"""Root-mean-square norm: y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from twinpool.kernels.jit import compiled, flat, load, runs_compiled, store


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula in float32, over the last dimension, rounded once to the type of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of each row: `x` [rows, width], contiguous; `weight` [width]. Returns a new tensor."""
    if x.is_cuda:
        from twinpool.kernels.gpu import rms_norm as gpu

        return gpu.rms_norm(x, weight, eps)
    if not runs_compiled(x):
        return rms_norm_reference(x, weight, eps)
    out = torch.empty_like(x)
    norm_rows(flat(x), flat(weight), np.float32(eps), flat(out), x.shape[0], 1, x.stride(0), 0)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `x` to `residual` in place and returns the norm of the sum; all [rows, width], contiguous."""
    if x.is_cuda:
        from twinpool.kernels.gpu import rms_norm as gpu

        return gpu.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)


@compiled
def norm_rows(
    x: Any, weight: Any, eps: Any, out: Any, num_rows: Any, num_heads: Any, row_stride: Any, head_stride: Any
) -> None:
    """`out` = the norm of each head of each row of `x`; both are flat, with the same strides, and may be the same."""
    width = weight.shape[0]
    for row in range(num_rows):
        for head in range(num_heads):
            start = row * row_stride + head * head_stride
            source, target = x[start : start + width], out[start : start + width]
            square = np.float32(0.0)
            for i in range(width):
                square += load(source, i) * load(source, i)
            scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + eps)
            for i in range(width):
                store(target, i, load(source, i) * scale * load(weight, i))
