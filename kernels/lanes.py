"""Vectors of sixteen 32-bit lanes in LLVM's own language, for inner loops that must stay in registers.

Numbers come in *units* of 32 bits: one float32, or two neighbouring bfloat16 of a row. Processors without 512-bit
registers run the same code in halves or quarters; without a bfloat16 dot product a unit's two products are added by
two fused multiply-adds. No sum is reordered (`compiled_exactly`): each lane depends on nothing but its own operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from twinpool.kernels import compiler
from twinpool.kernels.compiler import HAS_COMPILER, ir, numba, types
from twinpool.kernels.jit import KEEPS_COMPILED_CODE
from twinpool.kernels.tiles import BFloat16

Function = TypeVar("Function", bound=Callable[..., Any])
cgutils: Any = compiler.cgutils
LANES = 16
LOG2_E = 1.4426950408889634
_FMA = "llvm.fma.v16f32"
_EXP2 = (1.32764725e-3, 9.67554189e-3, 5.55071309e-2, 2.40221202e-1, 6.93146944e-1, 1.00000012)
"""Of least relative error (2e-7) on [-½, ½], by least squares with Lawson's weights; the highest power first."""

if HAS_COMPILER:
    VOID, F32, I32, I64 = ir.VoidType(), ir.FloatType(), ir.IntType(32), ir.IntType(64)
    BYTES = ir.IntType(8).as_pointer()
    FLOATS, UNITS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
    HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
else:  # nothing is emitted
    VOID = F32 = I32 = I64 = BYTES = FLOATS = UNITS = HALVES = None


def compiled_exactly(function: Function) -> Function:
    """Compiles `function` at its first call, without the interpreter lock; float sums keep their order.

    `fastmath` is said, because what is not is inherited from the function whose compilation needs this one.
    """
    if not HAS_COMPILER:
        return function
    jit = numba.njit(nogil=True, fastmath=False, error_model="numpy", cache=KEEPS_COMPILED_CODE)
    return cast(Function, jit(function))


class Emitter:
    """Writes the body of one intrinsic: `args` are its operands, of the types of `signature`."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, is_bf16: bool) -> None:
        self.builder = builder
        self.is_bf16 = is_bf16
        self.rows_per_unit = 2 if is_bf16 else 1
        """Neighbours in a unit of depth: elements of a row of the left matrix, rows of the right one."""
        self._context, self._signature, self._args = context, signature, args
        self._has_dot = "+avx512bf16" in context.codegen().magic_tuple()[2].split(",")

    def address(self, operand: int, *steps: Any) -> Any:
        """Of element Σ steps of the flat array that is operand number `operand`; a step may be (count, size)."""
        array = self._context.make_array(self._signature.args[operand])
        return self.builder.gep(
            array(self._context, self.builder, self._args[operand]).data, [self.sum(*steps)]
        )

    def sum(self, *steps: Any) -> Any:
        """Σ of 64-bit integers; a pair stands for its product, and a Python number for itself."""
        total: Any = I64(0)
        for step in steps:
            pair = step if isinstance(step, tuple) else (step, 1)
            a, b = (I64(value) if isinstance(value, int) else value for value in pair)
            total = self.builder.add(total, self.builder.mul(a, b))
        return total

    def range(self, stop: Any, step: int = 1) -> Any:
        """`with emitter.range(stop) as i`: a loop from 0 on."""
        return _Loop(self.builder, stop, step)

    def constant(self, value: float) -> Any:
        """A vector of equal floats."""
        return ir.Constant(FLOATS, [value] * LANES)

    def units(self, value: int) -> Any:
        """A vector of equal integers."""
        return ir.Constant(UNITS, [value] * LANES)

    def splat(self, value: Any) -> Any:
        """A vector of equal lanes."""
        kind = ir.VectorType(value.type, LANES)
        lone = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.builder.shuffle_vector(lone, lone, ir.Constant(UNITS, [0] * LANES))

    def load(self, address: Any, kind: Any, align: int = 4) -> Any:
        """Reads a value of type `kind`; `align` in bytes."""
        return self.builder.load(self.builder.bitcast(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        """Writes `value`; `align` in bytes."""
        self.builder.store(value, self.builder.bitcast(address, value.type.as_pointer()), align=align)

    def call(self, name: str, result: Any, *args: Any) -> Any:
        """Calls one of LLVM's functions."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def shuffle(self, a: Any, b: Any, order: list[int]) -> Any:
        """The lanes `order` of the two vectors one after the other."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, rounded once."""
        return self.call(_FMA, FLOATS, a, b, c)

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger of each lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combines the lanes in halves, always in this order."""
        for step in (8, 4, 2, 1):
            order = [(lane + step) % LANES for lane in range(LANES)]
            vector = combine(vector, self.shuffle(vector, vector, order))
        return self.builder.extract_element(vector, I32(0))

    def add_products(self, total: Any, left: Any, right: Any) -> Any:
        """total + the products of two vectors of units."""
        builder = self.builder
        if self.is_bf16 and self._has_dot:
            kind = ir.VectorType(BFloat16(), 2 * LANES)
            pairs = [builder.bitcast(side, kind) for side in (left, right)]
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)
        sides = [(left, right)]
        if self.is_bf16:
            low = tuple(builder.shl(side, self.units(16)) for side in (left, right))
            high = tuple(builder.and_(side, self.units(0xFFFF0000)) for side in (left, right))
            sides = [low, high]
        for a, b in sides:
            total = self.fma(builder.bitcast(a, FLOATS), builder.bitcast(b, FLOATS), total)
        return total

    def rounded(self, values: Any) -> Any:
        """Finite floats in the type of the rows: as they are, or as bfloat16, to nearest, ties to even."""
        builder = self.builder
        if not self.is_bf16:
            return values
        if self._has_dot:
            return builder.fptrunc(values, ir.VectorType(BFloat16(), LANES))
        bits = builder.bitcast(values, UNITS)
        odd = builder.and_(builder.lshr(bits, self.units(16)), self.units(1))
        bits = builder.lshr(builder.add(builder.add(bits, odd), self.units(0x7FFF)), self.units(16))
        return builder.trunc(bits, ir.VectorType(ir.IntType(16), LANES))

    def power_of_two(self, x: Any) -> Any:
        """2^x within 3 units in the last place; exactly 0 below -126, and for -inf.

        x = k + r with |r| ≤ ½; 2^r by a polynomial, times 2^k by adding to the exponent. Adding 1.5·2²³ rounds to the
        nearest integer and leaves it in the low bits.
        """
        builder, magic = self.builder, self.constant(12582912.0)
        shifted = builder.fadd(x, magic)
        r = builder.fsub(x, builder.fsub(shifted, magic))
        p = self.constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            p = self.fma(p, r, self.constant(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, UNITS), self.units(23))
        scaled = builder.bitcast(builder.add(builder.bitcast(p, UNITS), exponent), FLOATS)
        return builder.select(builder.fcmp_ordered(">", x, self.constant(-126.0)), scaled, self.constant(0.0))

    def load_units(self, rows: list[Any], unit: Any, num_units: Any) -> list[Any]:
        """Sixteen units from `unit` on of each row; zeros beyond `num_units`, where nothing is read."""
        builder = self.builder
        left = builder.sub(num_units, unit)
        addresses = [builder.gep(row, [unit]) for row in rows]
        has_all = builder.icmp_signed(">=", left, I64(LANES))
        with builder.if_else(has_all, likely=True) as (then, otherwise):
            with then:
                whole = [self.load(address, UNITS) for address in addresses]
                from_whole = builder.block
            with otherwise:
                numbers = ir.Constant(UNITS, list(range(LANES)))
                mask = builder.icmp_signed("<", numbers, self.splat(builder.trunc(left, I32)))
                pointers = [builder.bitcast(address, UNITS.as_pointer()) for address in addresses]
                masked = "llvm.masked.load.v16i32.p0"
                some = [self.call(masked, UNITS, p, I32(4), mask, self.units(0)) for p in pointers]
                from_some = builder.block
        merged = []
        for a, b in zip(whole, some, strict=True):
            merged.append(builder.phi(UNITS))
            merged[-1].add_incoming(a, from_whole)
            merged[-1].add_incoming(b, from_some)
        return merged

    def zip_rows(self, rows: list[Any]) -> list[Any]:
        """Vectors of units one unit deep: one float32 row as it is, or two bfloat16 rows, column by column."""
        if len(rows) == 1:
            return rows
        a, b = (self.builder.bitcast(row, HALVES) for row in rows)
        orders = [[half * LANES + i // 2 + i % 2 * 2 * LANES for i in range(2 * LANES)] for half in (0, 1)]
        return [self.builder.bitcast(self.shuffle(a, b, order), UNITS) for order in orders]

    def transpose(self, rows: list[Any]) -> list[Any]:
        """The columns of sixteen vectors, by what processors have: shuffles within quarters, then of quarters."""
        quarters = range(0, LANES, 4)
        pairs = [[q + i // 2 + i % 2 * LANES + high for q in quarters for i in range(4)] for high in (0, 2)]
        halves = [[q + i % 2 + i // 2 * LANES + high for q in quarters for i in range(4)] for high in (0, 2)]
        whole = [[4 * q + i for q in range(first, 8, 2) for i in range(4)] for first in (0, 1)]

        def both(a: Any, b: Any, orders: list[list[int]]) -> list[Any]:
            return [self.shuffle(a, b, order) for order in orders]

        # quads[i][k] has in its quarter q the column 4q + k of rows 4i to 4i + 3.
        quads = []
        for i in quarters:
            ab, cd = (both(rows[i + j], rows[i + j + 1], pairs) for j in (0, 2))
            quads.append([v for low, high in zip(ab, cd, strict=True) for v in both(low, high, halves)])
        columns: list[Any] = [None] * LANES
        for k in range(4):
            upper, lower = (both(quads[i][k], quads[i + 1][k], whole) for i in (0, 2))
            for odd in (0, 1):
                columns[4 * odd + k], columns[8 + 4 * odd + k] = both(upper[odd], lower[odd], whole)
        return columns


class _Loop:
    """`for i in range(0, stop, step)` as a context."""

    def __init__(self, builder: Any, stop: Any, step: int) -> None:
        self._loop = cgutils.for_range_slice(builder, I64(0), stop, I64(step))

    def __enter__(self) -> Any:
        return self._loop.__enter__()[0]

    def __exit__(self, *failure: Any) -> None:
        self._loop.__exit__(*failure)


def is_bf16(array: Any) -> bool:
    """Whether the numba type `array` is of bfloat16 bits."""
    return bool(array.dtype == types.uint16)
