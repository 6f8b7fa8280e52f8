"""The root-mean-square norm on a GPU: one program for each row, which it reads and writes once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinpool.kernels.gpu.variant import Variant


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `twinpool.kernels.rms_norm.rms_norm`."""
    out = torch.empty_like(x)
    _launch(x, x, weight, out, eps, adds=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `twinpool.kernels.rms_norm.add_rms_norm`."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps, adds=True)
    return out


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, adds: bool
) -> None:
    """All but `weight` are [rows, width], contiguous."""
    rows, width = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    _norm[(rows,)](x, residual, weight, out, eps, width, ADDS=adds, BLOCK=block, num_warps=_num_warps(block))


def _num_warps(block: int) -> int:
    """About 16 elements for each thread, which is two loads of 16 bytes in a 16-bit type."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _norm(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor, width: tl.tensor,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    inside = i < width
    wide = tl.load(x + start + i, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        # The norm is that of the stored, rounded sum: what later layers add to.
        wide += tl.load(residual + start + i, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(residual.dtype.element_ty)
        tl.store(residual + start + i, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + i, (wide * scale * factor).to(out.dtype.element_ty), mask=inside)


def _variant(dtype: str, width: int, adds: bool) -> Variant:
    pointers = dict.fromkeys(("x", "residual", "weight", "out"), f"*{dtype}")
    numbers = {"eps": "fp32", "width": "i32"}
    return Variant(
        _norm,
        f"{dtype}, {width} wide" + (", added" if adds else ""),
        pointers | numbers,
        {"ADDS": adds, "BLOCK": triton.next_power_of_2(width)},
        ("width",),
        _num_warps(triton.next_power_of_2(width)),
    )


VARIANTS = tuple(
    _variant(dtype, width, adds)
    for dtype, width, adds in (
        ("bf16", 576, False),
        ("bf16", 576, True),
        ("bf16", 16384, True),
        ("fp16", 4096, True),
        ("fp32", 4096, True),
    )
)
