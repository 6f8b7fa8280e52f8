"""The loop over rows of a product with a panel on processors with AMX (`amx_tiles` has the inner ones).

While tiles are multiplied, vectors are idle: the rows before are finished in between, a few for each few steps.
"""

from __future__ import annotations

from typing import Any

from twinpool.kernels.amx import ROWS
from twinpool.kernels.amx_tiles import (
    BLOCK_ROWS,
    HALF,
    STEP,
    STEP_UNITS,
    add_block,
    add_strip,
    clear,
    put_block,
    put_strip,
)
from twinpool.kernels.epilogue import finish
from twinpool.kernels.jit import compiled
from twinpool.kernels.tiles import PANEL, widen

_BLOCK_SUMS = BLOCK_ROWS * PANEL
AMX_SUMS = 2 * _BLOCK_SUMS
"""float32 elements of scratch: one block's sums are finished while the next one's are made."""
_GRAIN = 4
"""Steps between two looks at what is to be finished."""
_LINE_BYTES = 64


@compiled
def multiply_blocks(
    rows: Any, x: Any, x_at: Any, x_stride: Any, weights: Any, at: Any, coming: Any, coming_at: Any, words: Any,
    scales: Any, biases: Any, bias_at: Any, kind: Any, sums: Any, out: Any, out_at: Any, out_stride: Any, width: Any,
) -> None:  # fmt: skip
    """`rows` rows of x, at least one, times the panel that begins at weights[at]; asks memory for as long a panel that
    begins at coming[coming_at].

    Before, `use_tiles` has been told of min(rows, 16) rows. The last tiles of x begin so early that they end with it,
    so some rows may be multiplied twice. Integers are for 16 rows at most; `words` has room for a panel's words.
    """
    steps, num_tiles = x_stride // STEP, (rows + ROWS - 1) // ROWS
    lines = (PANEL * STEP * coming.itemsize // _LINE_BYTES + num_tiles - 1) // num_tiles
    last = max(rows - ROWS, 0)
    own, previous = 0, _BLOCK_SUMS
    for tile in range(0, num_tiles, 2):
        first, second = min(tile * ROWS, last), min((tile + 1) * ROWS, last)
        passes = min(num_tiles - tile, 2)
        for part in range(passes):
            clear()
            for step in range(0, steps, _GRAIN):
                count = min(_GRAIN, steps - step)
                inner, here = step * STEP, at + step * STEP * PANEL
                asked_at = coming_at + ((tile + part) * steps + step) * lines * _LINE_BYTES // coming.itemsize
                if passes == 2:
                    add_block(
                        x, x_at + first * x_stride + inner, x_at + second * x_stride + inner, x_stride, weights,
                        here + part * HALF * 2, count, coming, asked_at, lines,
                    )  # fmt: skip
                elif weights.itemsize == 1:
                    widen(weights, here, count * STEP_UNITS, words, 0)
                    add_strip(
                        x, x_at + first * x_stride + inner, x_stride, words, 0, count, coming, asked_at, lines
                    )
                else:
                    add_strip(
                        x, x_at + first * x_stride + inner, x_stride, weights, here, count, coming, asked_at, lines,
                    )  # fmt: skip
                if tile > 0:
                    begin = BLOCK_ROWS * (part * steps + step) // (passes * steps)
                    end = BLOCK_ROWS * (part * steps + step + count) // (passes * steps)
                    finish(
                        end - begin, sums, previous + begin * PANEL, scales.shape[0], scales, biases, bias_at,
                        kind, out, out_at + ((tile - 2) * ROWS + begin) * out_stride, out_stride, width,
                    )  # fmt: skip
            if passes == 2:
                put_block(sums, own + part * HALF)
            else:
                put_strip(sums, own)
        own, previous = previous, own
    tile = (num_tiles - 1) // 2 * 2
    for part in range(num_tiles - tile):
        row = (tile + part) * ROWS
        skipped = row - min(row, last)
        finish(
            min(rows, ROWS) - skipped, sums, previous + (part * ROWS + skipped) * PANEL, scales.shape[0], scales,
            biases, bias_at, kind, out, out_at + row * out_stride, out_stride, width,
        )  # fmt: skip
