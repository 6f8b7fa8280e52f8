"""y = x · weightᵀ + bias. On the CPU over weights that are packed once (`kernels/tiles.py` has the layout), by one
compiled function for every number of rows: ahead of oneDNN both at one row, where memory decides, and at many."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from twinpool.kernels.jit import compiled, exp, flat, load, runs_compiled, store
from twinpool.kernels.tiles import MAX_ROWS, PANEL, WORD_BYTES, tile

STORE, ADD, GATE = 0, 1, 2
"""What `multiply` does with a result y: out = y; out += y; out = silu(gate) · up, where y has both."""
SUMS = MAX_ROWS * PANEL
"""float32 elements of scratch that each rank of `multiply` needs."""
NO_BIAS = -1
_GATED = PANEL // 2
_LINE_BYTES = 64
_BLOCK_WORDS = 1 << 17
"""Rows whose x is this much (512 KiB) go through a panel before the next panel: both then stay in the second cache."""
_ROWS_TO_SHARE = 4 * MAX_ROWS
"""From so many rows per rank on, ranks share rows, evenly; below, panels, so that each weight is read by one rank."""


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The formula in float32, rounded once to the type of `x`."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class Linear:
    """A linear map with its weights, `weight` [out, in] and `bias` [out] or None, of one type. On the CPU a packed copy
    is all that is kept. bfloat16 sums up in float32 and is rounded once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._columns, self._width = weight.shape
        self._plain = None if runs_compiled(weight) else (weight, bias)
        if self._plain is None:
            matrix = pack(weight)
            packed = matrix if bias is None else torch.cat((matrix, pack_bias(bias)))
            self._packed = aligned(len(packed), weight.dtype)
            self._packed[:] = flat(packed)
            self._bias_at = NO_BIAS if bias is None else len(matrix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in], contiguous → [rows, out]."""
        if self._plain is not None:
            return F.linear(x, *self._plain)
        out = x.new_empty(x.shape[0], self._columns)
        x = F.pad(x, (0, padded(self._width, x.dtype) - self._width))
        multiply(
            0, 1, flat(x), x.shape[1], x.shape[0], self._packed, 0, self._bias_at, self._columns, STORE,
            np.empty(SUMS, np.float32), flat(out), self._columns,
        )  # fmt: skip
        return out


def padded(width: int, dtype: torch.dtype) -> int:
    """The number of elements that an inner dimension of `width` takes: whole words."""
    per_word = WORD_BYTES // dtype.itemsize
    return -(-width // per_word) * per_word


def packed_size(columns: int, width: int, dtype: torch.dtype) -> int:
    """Elements of the packed form of a matrix [columns, width]."""
    return -(-columns // PANEL) * PANEL * padded(width, dtype)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [columns, width] as panels, flat: [panel, word, 64, elements of a word], filled up with zeros."""
    columns, width = weight.shape
    per_word = WORD_BYTES // weight.dtype.itemsize
    whole = F.pad(weight, (0, -width % per_word, 0, -columns % PANEL))
    return whole.view(-1, PANEL, whole.shape[1] // per_word, per_word).transpose(1, 2).reshape(-1)


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """`bias` [columns] for whole panels."""
    return F.pad(bias, (0, -len(bias) % PANEL))


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The rows of both, [inner, …], as `GATE` wants them: each panel has 32 of `gate`, then their 32 of `up`."""
    missing = [0, 0] * (gate.dim() - 1) + [0, -gate.shape[0] % _GATED]
    halves = [F.pad(rows, missing).view(-1, _GATED, *rows.shape[1:]) for rows in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)


def aligned(size: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Uninitialised memory for `size` elements of what kernels call `dtype`, from the start of a cache line on.

    NumPy asks the system for huge pages from 4 MiB on: measured, one row then reads its weights twice as fast.
    """
    kind = np.uint16 if dtype is torch.bfloat16 else np.float32
    room = np.empty(size + _LINE_BYTES, kind)
    first = -room.ctypes.data % _LINE_BYTES // room.itemsize
    return room[first : first + size]


@compiled
def multiply(
    rank: Any, size: Any, x: Any, x_stride: Any, num_rows: Any, weights: Any, at: Any, bias_at: Any, columns: Any,
    kind: Any, sums: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Rank `rank`'s share of y = x · weightᵀ + bias; in the end `size` of them have done all of it.

    `x` [num_rows, x_stride], flat, has rows of whole words. In the flat `weights` a packed matrix begins at `at` and
    its bias at `bias_at`, if that is not NO_BIAS. Of `out` [num_rows, out_stride], flat, `columns` are written. `sums`
    is scratch: SUMS float32 per rank.
    """
    units = x_stride * x.itemsize // WORD_BYTES
    per_panel = _GATED if kind == GATE else PANEL
    num_panels = (columns + per_panel - 1) // per_panel
    first_row, end_row, first_panel, end_panel = 0, num_rows, 0, num_panels
    if num_rows >= size * _ROWS_TO_SHARE:
        first_row, end_row = num_rows * rank // size, num_rows * (rank + 1) // size
    else:
        first_panel, end_panel = num_panels * rank // size, num_panels * (rank + 1) // size
    block_rows = max(_BLOCK_WORDS // units, MAX_ROWS)
    for block in range(first_row, end_row, block_rows):
        rows = min(block_rows, end_row - block)
        num_tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
        for panel in range(first_panel, end_panel):
            width = min(per_panel, columns - panel * per_panel)
            bias = bias_at + panel * PANEL if bias_at != NO_BIAS else NO_BIAS
            for number in range(num_tiles):
                row = block + rows * number // num_tiles
                height = block + rows * (number + 1) // num_tiles - row
                _tile(
                    height, x, row * x_stride, x_stride, weights, at + panel * PANEL * x_stride, units, sums,
                    rank * SUMS,
                )  # fmt: skip
                _finish(
                    height, sums, rank * SUMS, weights, bias, kind, out, row * out_stride + panel * per_panel,
                    out_stride, width,
                )  # fmt: skip


@compiled
def _tile(
    height: Any, x: Any, x_at: Any, x_stride: Any, weights: Any, at: Any, units: Any, sums: Any, sums_at: Any
) -> None:
    if height == 6:
        tile(6, x, x_at, x_stride, weights, at, units, sums, sums_at)
    elif height == 5:
        tile(5, x, x_at, x_stride, weights, at, units, sums, sums_at)
    elif height == 4:
        tile(4, x, x_at, x_stride, weights, at, units, sums, sums_at)
    elif height == 3:
        tile(3, x, x_at, x_stride, weights, at, units, sums, sums_at)
    elif height == 2:
        tile(2, x, x_at, x_stride, weights, at, units, sums, sums_at)
    else:
        tile(1, x, x_at, x_stride, weights, at, units, sums, sums_at)


@compiled
def _finish(
    height: Any, sums: Any, sums_at: Any, weights: Any, bias_at: Any, kind: Any, out: Any, at: Any, stride: Any,
    width: Any,
) -> None:  # fmt: skip
    """Adds the bias to a tile's sums and puts the first `width` results of each row where they belong."""
    for row in range(height):
        line = sums[sums_at + row * PANEL : sums_at + (row + 1) * PANEL]
        target = out[at + row * stride : at + row * stride + width]
        if bias_at != NO_BIAS:
            for i in range(PANEL):
                line[i] += load(weights, bias_at + i)
        if kind == GATE:
            for i in range(width):
                gate = line[i]
                store(target, i, gate / (np.float32(1.0) + exp(-gate)) * line[_GATED + i])
        elif kind == ADD:
            for i in range(width):
                store(target, i, load(target, i) + line[i])
        else:
            for i in range(width):
                store(target, i, line[i])
