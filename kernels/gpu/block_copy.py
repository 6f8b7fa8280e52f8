"""Blocks of the pool to and from contiguous memory on a GPU, in one launch whatever their number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinpool.kernels.gpu.variant import Variant

_BLOCK, _NUM_WARPS = 1024, 4
"""Words of eight bytes: four loads of 16 bytes for each thread."""


def gather_blocks(runs: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """As `twinpool.kernels.block_copy.gather_blocks`."""
    _launch(runs, block_ids, staging, gathers=True)


def scatter_blocks(staging: torch.Tensor, runs: torch.Tensor, block_ids: torch.Tensor) -> None:
    """As `twinpool.kernels.block_copy.scatter_blocks`."""
    _launch(runs, block_ids, staging, gathers=False)


def _launch(runs: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, gathers: bool) -> None:
    num_layers, num_bytes = runs.shape[1], runs.shape[3]
    if staging.numel() == 0:
        return
    word = torch.int64 if num_bytes % 8 == 0 else torch.int8
    runs, staging = runs.view(word), staging.view(word)
    length = runs.shape[3]
    _copy[(len(block_ids), num_layers * 2, triton.cdiv(length, _BLOCK))](
        runs, block_ids, staging, *runs.stride()[:3], num_layers, length,
        GATHERS=gathers, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _copy(
    runs: tl.tensor, block_ids: tl.tensor, staging: tl.tensor,
    block_stride: tl.tensor, layer_stride: tl.tensor, side_stride: tl.tensor,
    num_layers: tl.tensor, length: tl.tensor, GATHERS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index, layer, side = tl.program_id(0), tl.program_id(1) // 2, tl.program_id(1) % 2
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    block = tl.load(block_ids + index).to(tl.int64)
    pooled = runs + block * block_stride + layer * layer_stride + side * side_stride + i
    staged = staging + (index.to(tl.int64) * num_layers * 2 + tl.program_id(1)) * length + i
    if GATHERS:
        tl.store(staged, tl.load(pooled, mask=inside), mask=inside)
    else:
        tl.store(pooled, tl.load(staged, mask=inside), mask=inside)


_STRIDES = ("block_stride", "layer_stride", "side_stride")
VARIANTS = tuple(
    Variant(
        _copy,
        f"{word}, {'gather' if gathers else 'scatter'}",
        {"runs": f"*{word}", "block_ids": "*i64", "staging": f"*{word}"}
        | dict.fromkeys((*_STRIDES, "num_layers", "length"), "i32"),
        {"GATHERS": gathers, "BLOCK": _BLOCK},
        (*_STRIDES, "length"),
        _NUM_WARPS,
    )
    for word in ("i64", "i8")
    for gathers in (True, False)
)
