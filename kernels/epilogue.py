"""What becomes of a product's sums: scaled, with a bias, activated or added to what is there, and rounded once.

One loop over rows for each kind, written as LLVM vectors (`lanes`), so that nothing depends on what a compiler makes
of it. The last panel of a matrix may have fewer columns: there, accesses to the result are masked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinpool.kernels.compiler import HAS_COMPILER, intrinsic, ir, types
from twinpool.kernels.lanes import FLOATS, I32, LANES, UNITS, VOID, Emitter, is_bf16
from twinpool.kernels.tiles import PANEL

# Numba calls this with its own contexts, and with types in place of values.
# ruff: noqa: ARG001

STORE, ADD, GATE = 0, 1, 2
"""What is done with a result y: out = y; out += y; out = silu(gate) · up, where y has both."""
NO_BIAS = -1
GATED = PANEL // 2
"""Columns of gate in a panel that has both: as many of up follow."""
_FAST = ("fast",)
_VECTORS = PANEL // LANES
_CELLS: Any = ir.VectorType(ir.IntType(16), LANES) if HAS_COMPILER else None
_TAYLOR = (1.98412698e-4, 1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0)
"""Of e^r, the highest power first."""


def _finish(
    typing_context: Any, height: Any, sums: Any, sums_at: Any, num_scales: Any, scales: Any, biases: Any, bias_at: Any,
    kind: Any, out: Any, at: Any, stride: Any, width: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = _Epilogue(context, builder, signature, args, is_bf16(out))
        for number, columns in ((STORE, PANEL), (ADD, PANEL), (GATE, GATED)):
            is_kind = builder.icmp_signed("==", args[7], args[7].type(number))
            with builder.if_then(is_kind):
                is_whole = builder.icmp_signed("==", args[11], args[11].type(columns))
                with builder.if_else(is_whole) as (whole, part):
                    with whole:
                        emitter.rows(number, [None] * (columns // LANES))
                    with part:
                        emitter.rows(number, emitter.masks(columns // LANES))
        return context.get_dummy_value()

    number = types.int64
    return types.void(
        number, sums, number, number, scales, biases, number, number, out, number, number, number
    ), generate


class _Epilogue(Emitter):
    """Emits the loops over rows. Operands are numbered as `_finish` has them."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, is_bf16: bool) -> None:
        super().__init__(context, builder, signature, args, is_bf16)
        self._has_bf16_bias = bool(signature.args[5].dtype == types.uint16)

    def masks(self, count: int) -> list[Any]:
        """Of `count` vectors: which lanes are columns of the matrix."""
        width = self.splat(self.builder.trunc(self._args[11], I32))
        lanes = (list(range(first, first + LANES)) for first in range(0, count * LANES, LANES))
        return [self.builder.icmp_signed("<", ir.Constant(UNITS, numbers), width) for numbers in lanes]

    def rows(self, kind: int, masks: list[Any]) -> None:
        """All rows; `masks` has one for each vector of results, or None where all of it is."""
        height, sums_at, num_scales, bias_at, at, stride = (self._args[i] for i in (0, 2, 3, 6, 9, 10))
        zero = num_scales.type(0)
        has_scales = self.builder.icmp_signed("!=", num_scales, zero)
        has_bias = self.builder.icmp_signed("!=", bias_at, zero.type(NO_BIAS))
        with self.range(height) as row:
            line = [
                self.load(self.address(1, sums_at, (row, PANEL), LANES * v), FLOATS) for v in range(_VECTORS)
            ]
            line = self._changed(has_scales, line, self._scaled)
            line = self._changed(has_bias, line, self._with_bias)
            if kind == GATE:
                line = [self._gated(*pair) for pair in zip(line[:2], line[2:], strict=True)]
            for vector, (values, mask) in enumerate(zip(line, masks, strict=True)):
                place = self.address(8, at, (row, stride), LANES * vector)
                if kind == ADD:
                    values = self.builder.fadd(self._read(place, mask), values, flags=_FAST)
                self._write(values, place, mask)

    def _changed(self, condition: Any, vectors: list[Any], change: Any) -> list[Any]:
        """`change` of the vectors if the condition holds, else themselves."""
        before = self.builder.block
        with self.builder.if_then(condition):
            changed = change(vectors)
            end = self.builder.block
        merged = [self.builder.phi(FLOATS) for _ in vectors]
        for phi, old, new in zip(merged, vectors, changed, strict=True):
            phi.add_incoming(old, before)
            phi.add_incoming(new, end)
        return merged

    def _scaled(self, line: list[Any]) -> list[Any]:
        scales = (self.load(self.address(4, LANES * v), FLOATS) for v in range(_VECTORS))
        return [self.builder.fmul(values, scale) for values, scale in zip(line, scales, strict=True)]

    def _with_bias(self, line: list[Any]) -> list[Any]:
        places = (self.address(5, self._args[6], LANES * v) for v in range(_VECTORS))
        if self._has_bf16_bias:
            biases = (self._as_floats(self.load(place, _CELLS, 2)) for place in places)
        else:
            biases = (self.load(place, FLOATS) for place in places)
        return [self.builder.fadd(values, bias) for values, bias in zip(line, biases, strict=True)]

    def _gated(self, gate: Any, up: Any) -> Any:
        """silu(gate) · up"""
        builder = self.builder
        power = self.exp(builder.fneg(gate, flags=_FAST))
        share = builder.fdiv(gate, builder.fadd(self.constant(1.0), power, flags=_FAST), flags=_FAST)
        return builder.fmul(share, up, flags=_FAST)

    def exp(self, x: Any) -> Any:
        """`jit.exp` of each lane, operation by operation."""
        builder = self.builder

        def constant(number: float) -> Any:
            return self.constant(float(np.float32(number)))

        k = self.call("llvm.rint.v16f32", FLOATS, builder.fmul(x, constant(1.44269504), flags=_FAST))
        r = builder.fsub(x, builder.fmul(k, constant(0.693359375), flags=_FAST), flags=_FAST)
        r = builder.fadd(r, builder.fmul(k, constant(2.12194440e-4), flags=_FAST), flags=_FAST)
        p = constant(_TAYLOR[0])
        for coefficient in _TAYLOR[1:]:
            p = builder.fadd(builder.fmul(p, r, flags=_FAST), constant(coefficient), flags=_FAST)
        low, high = constant(-127.0), constant(127.0)
        k = builder.select(builder.fcmp_ordered(">", k, low), k, low)
        k = builder.select(builder.fcmp_ordered("<", k, high), k, high)
        exponent = builder.shl(builder.add(builder.fptosi(k, UNITS), self.units(127)), self.units(23))
        power = builder.fmul(p, builder.bitcast(exponent, FLOATS), flags=_FAST)
        return builder.select(builder.fcmp_ordered(">", x, constant(-87.0)), power, constant(0.0))

    def _as_floats(self, cells: Any) -> Any:
        """bfloat16 bits as floats."""
        return self.builder.bitcast(self.builder.shl(self.builder.zext(cells, UNITS), self.units(16)), FLOATS)

    def _read(self, place: Any, mask: Any) -> Any:
        """Sixteen results that are there."""
        kind, align = (_CELLS, 2) if self.is_bf16 else (FLOATS, 4)
        if mask is None:
            values = self.load(place, kind, align)
        else:
            pointer = self.builder.bitcast(place, kind.as_pointer())
            name = f"llvm.masked.load.{'v16i16' if self.is_bf16 else 'v16f32'}.p0"
            values = self.call(name, kind, pointer, I32(align), mask, ir.Constant(kind, None))
        return self._as_floats(values) if self.is_bf16 else values

    def _write(self, values: Any, place: Any, mask: Any) -> None:
        kind, align = (_CELLS, 2) if self.is_bf16 else (FLOATS, 4)
        values = self.builder.bitcast(self.rounded(values), kind)
        if mask is None:
            self.store(values, place, align)
        else:
            pointer = self.builder.bitcast(place, kind.as_pointer())
            name = f"llvm.masked.store.{'v16i16' if self.is_bf16 else 'v16f32'}.p0"
            self.call(name, VOID, values, pointer, I32(align), mask)


finish: Any = intrinsic(_finish)
"""`finish(height, sums, sums_at, num_scales, scales, biases, bias_at, kind, out, at, stride, width)`, in compiled code
only: puts the first `width` results of each of `height` rows of 64 sums, from sums[sums_at] on, into `out` from out[at]
on, in rows `stride` elements apart. `kind` is STORE, ADD or GATE. `scales` has one for each column if `num_scales` is
not 0; biases[bias_at] is the first of the panel's 64, unless that is NO_BIAS. `sums` and `scales` are float32, `biases`
and `out` float32 or bfloat16 bits, all flat."""
