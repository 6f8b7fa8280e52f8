"""y = x · weightᵀ + bias. On the CPU over weights that are packed once (`kernels/tiles.py` has the layout), by one
compiled function for every number of rows: ahead of oneDNN both at one row, where memory decides, and at many."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from twinpool.kernels.amx import ROWS, USES_AMX
from twinpool.kernels.amx_product import AMX_SUMS, multiply_blocks
from twinpool.kernels.amx_tiles import BLOCK_ROWS, STEP, leave_tiles, use_tiles
from twinpool.kernels.epilogue import ADD, GATE, GATED, NO_BIAS, STORE, finish
from twinpool.kernels.jit import compiled, flat, runs_compiled
from twinpool.kernels.tiles import LANES, MAX_ROWS, PANEL, WORD_BYTES, tile, widen

__all__ = [
    "ADD", "GATE", "NO_BIAS", "STORE", "SUMS", "Linear", "aligned", "interleaved", "linear_reference", "multiply",
    "pack", "pack_bias", "pack_integers", "packed_size", "padded", "panel_scratch_size", "quantized",
]  # fmt: skip

SUMS = max(MAX_ROWS * PANEL, AMX_SUMS)
"""float32 elements of scratch that each rank of `multiply` needs; `panel_scratch_size` more if weights are integers."""
SCALES_BYTES = 4 * PANEL
"""A panel of integers begins with a float32 scale for each of its columns."""
_LINE_BYTES = 64
_MOST = 127.0
_BLOCK_WORDS = 1 << 17
"""Rows whose x is this much (512 KiB) go through a panel before the next panel: both then stay in the second cache."""
_ROWS_TO_SHARE = 4 * MAX_ROWS
_ROWS_TO_SHARE_WITH_AMX = 4 * ROWS
"""From so many rows per rank on, ranks share rows, evenly; below, panels, so that each weight is read by one rank."""
_ROWS_TO_WIDEN = 4 * MAX_ROWS
"""From so many rows on, words are made of a panel's integers once and kept; below, for each tile again in registers."""


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
            0, 1, flat(x), x.shape[1], x.shape[0], self._packed, 0, self._packed, self._bias_at, self._columns, STORE,
            aligned(SUMS, torch.float32), flat(out), self._columns,
        )  # fmt: skip
        return out


def padded(width: int, dtype: torch.dtype) -> int:
    """The number of elements that an inner dimension of `width` takes: whole words."""
    per_word = WORD_BYTES // dtype.itemsize
    return -(-width // per_word) * per_word


def packed_size(columns: int, width: int, dtype: torch.dtype, *, as_integers: bool = False) -> int:
    """Elements of the packed form of a matrix [columns, width]: of `dtype`, or of int8."""
    panel = PANEL * padded(width, dtype) + (SCALES_BYTES if as_integers else 0)
    return -(-columns // PANEL) * panel


def panel_scratch_size(width: int, dtype: torch.dtype) -> int:
    """float32 elements beside SUMS that a rank needs for integer weights of an inner dimension of up to `width`."""
    return PANEL * padded(width, dtype) * dtype.itemsize // WORD_BYTES


def pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [columns, width] as panels, flat: [panel, word, 64, elements of a word], filled up with zeros."""
    columns, width = weight.shape
    per_word = WORD_BYTES // weight.dtype.itemsize
    whole = F.pad(weight, (0, -width % per_word, 0, -columns % PANEL))
    return whole.view(-1, PANEL, whole.shape[1] // per_word, per_word).transpose(1, 2).reshape(-1)


def pack_integers(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [columns, width] rounded to int8, as panels, flat: each has its columns' scales and then their
    integers. A column c of the matrix is about scale_c · integers; its largest element is ±127 · scale_c.
    """
    columns, width = weight.shape
    per_word = WORD_BYTES // weight.dtype.itemsize
    scales, integers = quantized(weight)
    whole = F.pad(integers, (0, -width % per_word, 0, -columns % PANEL))
    units = whole.shape[1] // per_word
    if per_word == 1:
        words = whole.view(-1, PANEL, units).transpose(1, 2)
    else:  # [panel, two vectors, vector, four columns, column, word, element]: the order that `tiles` wants
        apart = whole.view(-1, PANEL // (2 * LANES), 2, LANES // 4, 4, units, per_word)
        words = apart.permute(0, 5, 1, 3, 2, 4, 6)
    rows = F.pad(scales, (0, -columns % PANEL)).view(-1, PANEL).view(torch.int8)
    return torch.cat((rows, words.flatten(1)), dim=1).flatten()


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of `weight` [columns, width]: its float32 scale, and its elements over that as int8 of -127 to 127,
    the nearest."""
    largest = torch.maximum(weight.amax(1), -weight.amin(1)).float()
    scales = largest / _MOST
    inverse = torch.where(largest > 0, _MOST / largest, 0.0)
    return scales, (weight.float() * inverse[:, None]).round_().to(torch.int8)


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """`bias` [columns] for whole panels."""
    return F.pad(bias, (0, -len(bias) % PANEL))


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The rows of both, [inner, …], as `GATE` wants them: each panel has 32 of `gate`, then their 32 of `up`."""
    missing = [0, 0] * (gate.dim() - 1) + [0, -gate.shape[0] % GATED]
    halves = [F.pad(rows, missing).view(-1, GATED, *rows.shape[1:]) for rows in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)


def aligned(size: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Uninitialised memory for `size` elements of what kernels call `dtype`, from the start of a cache line on.

    NumPy asks the system for huge pages from 4 MiB on: measured, one row then reads its weights twice as fast.
    """
    kind = {torch.bfloat16: np.uint16, torch.int8: np.int8}.get(dtype, np.float32)
    room = np.empty(size + _LINE_BYTES, kind)
    first = -room.ctypes.data % _LINE_BYTES // room.itemsize
    return room[first : first + size]


@compiled
def multiply(
    rank: Any, size: Any, x: Any, x_stride: Any, num_rows: Any, weights: Any, at: Any, biases: Any, bias_at: Any,
    columns: Any, kind: Any, sums: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Rank `rank`'s share of y = x · weightᵀ + bias; in the end `size` of them have done all of it.

    `x` [num_rows, x_stride], flat, has rows of whole words. In the flat `weights` a packed matrix begins at `at`, in
    the flat `biases` its bias at `bias_at`, if that is not NO_BIAS. Of `out` [num_rows, out_stride], flat, `columns`
    are written. `sums` is scratch: as many float32 for each rank, SUMS at least.
    """
    units = x_stride * x.itemsize // WORD_BYTES
    has_tiles = USES_AMX and x.itemsize < WORD_BYTES and x_stride % STEP == 0
    panel_size = PANEL * x_stride + (SCALES_BYTES if weights.itemsize == 1 else 0)
    per_panel = GATED if kind == GATE else PANEL
    num_panels = (columns + per_panel - 1) // per_panel
    own = sums[rank * (sums.shape[0] // size) : (rank + 1) * (sums.shape[0] // size)]
    first_row, end_row, first_panel, end_panel = 0, num_rows, 0, num_panels
    if num_rows >= size * (_ROWS_TO_SHARE_WITH_AMX if has_tiles else _ROWS_TO_SHARE):
        first_row, end_row = num_rows * rank // size, num_rows * (rank + 1) // size
    else:
        first_panel, end_panel = num_panels * rank // size, num_panels * (rank + 1) // size
    block_rows = max(_BLOCK_WORDS // units, MAX_ROWS)
    if has_tiles:
        block_rows = _even_block(end_row - first_row, 2 * block_rows)
    for block in range(first_row, end_row, block_rows):
        rows = min(block_rows, end_row - block)
        if has_tiles:
            use_tiles(min(rows, ROWS))
        for panel in range(first_panel, end_panel):
            width = min(per_panel, columns - panel * per_panel)
            bias = bias_at + panel * PANEL if bias_at != NO_BIAS else NO_BIAS
            _multiply_panel(
                rows, x, block * x_stride, x_stride, weights, at + panel * panel_size, panel_size, units, has_tiles,
                biases, bias, kind, own, out, block * out_stride + panel * per_panel, out_stride, width,
            )  # fmt: skip
    if has_tiles and end_row > first_row:
        leave_tiles()


@compiled
def _even_block(rows: Any, most: Any) -> Any:
    """As few blocks as have at most about `most` rows, all of whole pairs of tiles but the last."""
    num_blocks = max((rows + most - 1) // most, 1)
    each = max((rows + num_blocks - 1) // num_blocks, 1)
    return (each + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS


@compiled
def _multiply_panel(
    rows: Any, x: Any, x_at: Any, x_stride: Any, weights: Any, at: Any, panel_size: Any, units: Any, has_tiles: Any,
    biases: Any, bias_at: Any, kind: Any, sums: Any, out: Any, out_at: Any, out_stride: Any, width: Any,
) -> None:  # fmt: skip
    """`rows` rows of x times the panel that begins at weights[at]."""
    first = at + (SCALES_BYTES if weights.itemsize == 1 else 0)
    scales = weights[at:first].view(np.float32)
    words = sums[SUMS:].view(x.dtype)
    is_widened = weights.itemsize == 1 and rows > (ROWS if has_tiles else _ROWS_TO_WIDEN - 1)
    if is_widened:
        widen(weights, first, units, words, 0)
    if has_tiles and is_widened:
        multiply_blocks(
            rows, x, x_at, x_stride, words, 0, weights, at + panel_size, words, scales, biases, bias_at, kind, sums,
            out, out_at, out_stride, width,
        )  # fmt: skip
    elif has_tiles:
        multiply_blocks(
            rows, x, x_at, x_stride, weights, first, weights, at + panel_size, words, scales, biases, bias_at, kind,
            sums, out, out_at, out_stride, width,
        )  # fmt: skip
    elif is_widened:
        _multiply_rows(
            rows, x, x_at, x_stride, words, 0, units, scales, biases, bias_at, kind, sums, out, out_at, out_stride,
            width,
        )  # fmt: skip
    else:
        _multiply_rows(
            rows, x, x_at, x_stride, weights, first, units, scales, biases, bias_at, kind, sums, out, out_at,
            out_stride, width,
        )  # fmt: skip


@compiled
def _multiply_rows(
    rows: Any, x: Any, x_at: Any, x_stride: Any, weights: Any, at: Any, units: Any, scales: Any, biases: Any,
    bias_at: Any, kind: Any, sums: Any, out: Any, out_at: Any, out_stride: Any, width: Any,
) -> None:  # fmt: skip
    """As `_multiply_panel`, in tiles; `scales` of the panel's columns, or none."""
    num_tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    for number in range(num_tiles):
        row = rows * number // num_tiles
        height = rows * (number + 1) // num_tiles - row
        _tile(height, x, x_at + row * x_stride, x_stride, weights, at, units, sums, 0)
        finish(
            height, sums, 0, scales.shape[0], scales, biases, bias_at, kind, out, out_at + row * out_stride, out_stride,
            width,
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
