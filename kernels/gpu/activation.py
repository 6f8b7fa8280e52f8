"""The gated activation on a GPU: each gate and each up value is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinpool.kernels.gpu.variant import Variant

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `twinpool.kernels.activation.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows > 0:
        _silu_mul[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gates = gate_up + 2 * row * width + i
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # cannot overflow
    sigmoid = tl.where(gate >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(out + row * width + i, (gate * sigmoid * up).to(out.dtype.element_ty), mask=inside)


VARIANTS = tuple(
    Variant(
        _silu_mul,
        dtype,
        {"gate_up": f"*{dtype}", "out": f"*{dtype}", "width": "i32"},
        {"BLOCK": _BLOCK},
        ("width",),
    )
    for dtype in ("bf16", "fp16", "fp32")
)
