"""y = x · weightᵀ + bias. On the CPU with weights packed once for oneDNN, which beats packing them at every call; and
for one or two rows of bfloat16, where only the speed of reading the weights counts, by a plain loop over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from twinpool.kernels.jit import compiled, flat, load, runs_compiled, store

_PACK_ROWS = 32
"""The number of rows that the packed layout is chosen for; measured good from 1 to 512."""
_FEW_ROWS = 2
"""Up to this many bfloat16 rows go to the loop. Measured: twice as fast at 1, slower from 4."""


class Linear:
    """A linear map with its weights, `weight` [out, in] and `bias` [out] or None, in float32 or bfloat16.

    Arithmetic stays in the type of the weights; bfloat16 accumulates in float32 and is rounded once. On the CPU the
    weights are also kept in oneDNN's order: float32 only so, bfloat16 twice (`COPIES`).
    """

    COPIES = 2

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        onednn: Any = torch.backends.mkldnn
        on_cpu = weight.device.type == "cpu" and onednn.is_available()
        self._bias = bias
        self._size = weight.shape[0]
        self._packed = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS) if on_cpu else None
        )
        self._weight = None if on_cpu else weight
        looped = on_cpu and weight.dtype is torch.bfloat16 and runs_compiled(weight)
        self._rows = flat(weight.contiguous()) if looped else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in], contiguous → [rows, out]."""
        if self._rows is not None and x.shape[0] <= _FEW_ROWS:
            out = x.new_empty(x.shape[0], self._size)
            _multiply(flat(x), self._rows, flat(out), x.shape[1])
            return out if self._bias is None else out.add_(self._bias)
        if self._packed is not None:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self._bias, "none", [], ""
            )
            return packed
        assert self._weight is not None  # one of the two is always kept
        return F.linear(x, self._weight, self._bias)


@compiled
def _multiply(x: Any, weight: Any, out: Any, width: Any) -> None:
    """Rows of `x` times rows of `weight`, both `width` long; each weight is read once from memory."""
    num_rows, size = x.shape[0] // width, weight.shape[0] // width
    wide = np.empty(x.shape[0], np.float32)
    for i in range(x.shape[0]):
        wide[i] = load(x, i)
    for column in range(size):
        weights = weight[column * width : (column + 1) * width]
        for row in range(num_rows):
            values = wide[row * width : (row + 1) * width]
            total = np.float32(0.0)
            for i in range(width):
                total += values[i] * load(weights, i)
            store(out, row * size + column, total)
