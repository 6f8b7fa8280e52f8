"""How one element of the KV pool becomes a number and the other way round, inside kernels.

`FORMAT` is "plain" (the pool has the model's type), "fp8" (e4m3, stored as bytes) or "int8" (with a float32 scale per
token and head behind each run of a block's vectors: `kernels/quantized_kv.py` says where). The 8-bit float is taken
apart by shifts, so the same kernels run where the hardware has no such type (sm_80).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinpool.kernels.quantized_kv import LEAST_AMAX, MOST_FP8, MOST_INT8

_MOST_FP8 = tl.constexpr(MOST_FP8)
_MOST_INT8 = tl.constexpr(MOST_INT8)
_LEAST_AMAX = tl.constexpr(LEAST_AMAX)

FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""By the pool's element type; "plain" for any other."""


def kv_format(kv: torch.Tensor) -> str:
    """The pool's `FORMAT`."""
    return FORMATS.get(kv.dtype, "plain")


def raw(kv: torch.Tensor) -> torch.Tensor:
    """The pool as kernels take it: 8-bit floats as bytes."""
    return kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv


@triton.jit
def load_kv(pointers: tl.tensor, mask: tl.tensor, FORMAT: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Elements as `DOT` numbers, 0 where masked; those of "int8" are still to be multiplied by their scale."""
    cells = tl.load(pointers, mask=mask, other=0)
    if FORMAT == "fp8":
        return _fp8_to_float16(cells).to(DOT)
    return cells.to(DOT)


@triton.jit
def load_scales(
    planes: tl.tensor, slots: tl.tensor, mask: tl.tensor, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """The scales of `slots` of an "int8" pool; `planes` point at the first vector of each slot's block and head."""
    return tl.load(_scales(planes, BLOCK_SIZE, HEAD_DIM) + slots, mask=mask, other=0.0)


@triton.jit
def store_scales(
    planes: tl.tensor, slots: tl.tensor, amax: tl.tensor, mask: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the scales of vectors whose largest elements are `amax`; an "int8" pool needs them, no other has them."""
    scales = tl.div_rn(tl.maximum(amax, _LEAST_AMAX), _MOST_INT8)
    tl.store(_scales(planes, BLOCK_SIZE, HEAD_DIM) + slots, scales, mask=mask)


@triton.jit
def cells_of(numbers: tl.tensor, amax: tl.tensor, FORMAT: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """What is stored for float32 numbers. `PLAIN` is the type of a "plain" pool; `amax`, which an "int8" one needs, is
    the largest size in each number's vector."""
    if FORMAT == "int8":
        steps = numbers * tl.div_rn(_MOST_INT8, tl.maximum(amax, _LEAST_AMAX))
        # Adding and taking away 1.5 · 2²³ rounds to the nearest integer, ties to even.
        return ((steps + 12582912.0) - 12582912.0).to(tl.int8)
    if FORMAT == "fp8":
        return _float32_to_fp8(numbers)
    return numbers.to(PLAIN)


@triton.jit
def _scales(planes: tl.tensor, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    return (planes + BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32))


@triton.jit
def _fp8_to_float16(cells: tl.tensor) -> tl.tensor:
    """e4m3 (sign, 4 bits of exponent with bias 7, 3 of mantissa) moved into float16's fields, whose bias is 15."""
    bits = cells.to(tl.int16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _float32_to_fp8(numbers: tl.tensor) -> tl.tensor:
    """The nearest e4m3, ties to even, as bytes; what is too large becomes the largest."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(numbers), _MOST_FP8)
    size_bits = size.to(tl.int32, bitcast=True)
    # Normal numbers: keep 3 bits of mantissa, bias 127 becomes 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ the step is 2⁻⁹, which is also that of float32 at 2¹⁴: the sum's low bits count the steps.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, tiny, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)
