"""y = x · weightᵀ + bias, on the CPU with weights packed once for oneDNN (faster than repacking at every call, most of
all for few rows)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_PACK_ROWS = 32
"""The number of rows that the packed layout is chosen for; measured good from 1 to 512."""


class Linear:
    """A linear map with its weights, `weight` [out, in] and `bias` [out] or None, in float32 or bfloat16.

    On the CPU the weights are copied into oneDNN's own order, so the caller may drop `weight`. Arithmetic stays in the
    type of the weights (bfloat16 accumulates in float32).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in] → [rows, out]."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y
