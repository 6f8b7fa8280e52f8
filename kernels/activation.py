"""The gated activation of Llama's feed-forward: silu(gate) · up with silu(x) = x / (1 + e^-x) (Shazeer 2020,
arXiv:2002.05202). The compiled decoder of a CPU has it within the product before it (`kernels/linear.py`, GATE)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [rows, 2 · width], contiguous, gate first; returns [rows, width]."""
    if gate_up.is_cuda:
        from twinpool.kernels.gpu import activation as gpu

        return gpu.silu_mul(gate_up)
    return silu_mul_reference(gate_up)
