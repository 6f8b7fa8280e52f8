"""The gated activation of Llama's feed-forward: silu(gate) · up with silu(x) = x / (1 + e^-x) (Shazeer 2020,
arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from twinpool.kernels.jit import compiled, exp, flat, load, runs_compiled, store


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [rows, 2 · width], contiguous, gate first; returns [rows, width]."""
    if gate_up.is_cuda:
        from twinpool.kernels.gpu import activation as gpu

        return gpu.silu_mul(gate_up)
    if not runs_compiled(gate_up):
        return silu_mul_reference(gate_up)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _silu_mul(flat(gate_up), flat(out), out.shape[1])
    return out


@compiled
def _silu_mul(gate_up: Any, out: Any, width: Any) -> None:
    for start in range(0, out.shape[0], width):
        gates, ups = (
            gate_up[2 * start : 2 * start + width],
            gate_up[2 * start + width : 2 * start + 2 * width],
        )
        target = out[start : start + width]
        for i in range(width):
            gate = load(gates, i)
            store(target, i, gate / (np.float32(1.0) + exp(-gate)) * load(ups, i))
