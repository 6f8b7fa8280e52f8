"""Vectors of sixteen 32-bit lanes, written in LLVM's own language, for inner loops that must stay in registers.

All work on a flat float32 *scratch* array that counts in *units* of 32 bits: one float32, or two neighbouring bfloat16.
A matrix product then has one form for both: units of a row of the left matrix times *panels* of the right one, which
hold, for each unit of depth, sixteen columns side by side. Processors without 512-bit registers run the same code in
halves or quarters; without a bfloat16 dot product a unit's two products are added by two fused multiply-adds.

No sum is reordered (`compiled_exactly`), so each result depends on nothing but its own row and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from twinpool.kernels.compiler import HAS_COMPILER, intrinsic, ir, numba, types
from twinpool.kernels.compiler import cgutils as untyped_cgutils
from twinpool.kernels.jit import KEEPS_COMPILED_CODE

Function = TypeVar("Function", bound=Callable[..., Any])
cgutils: Any = untyped_cgutils
LANES = 16
_LINE_BYTES = 64
_FMA = "llvm.fma.v16f32"


def compiled_exactly(function: Function) -> Function:
    """Compiles `function` at its first call, without the interpreter lock; float sums keep their order."""
    if not HAS_COMPILER:
        return function
    jit = numba.njit(nogil=True, error_model="numpy", cache=KEEPS_COMPILED_CODE)
    return cast(Function, jit(function))


if HAS_COMPILER:

    class _BFloat(ir.types.Type):  # type: ignore[misc]
        """LLVM's bfloat, which llvmlite does not name."""

        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, _BFloat)

        def __hash__(self) -> int:
            return hash(_BFloat)

    _F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
    _FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
    _HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
    _PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _is_bf16(array: Any) -> bool:
    return bool(array.dtype == types.uint16)


def _has_dot(context: Any) -> bool:
    """Whether code is compiled for AVX512-BF16, which multiplies and adds pairs of bfloat16 in one instruction."""
    return "+avx512bf16" in context.codegen().magic_tuple()[2].split(",")


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _constant(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, address: Any, align: int = 4) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=align)


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, _FMA, _FLOATS, a, b, c)


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines the lanes in halves, always in this order."""
    for step in (8, 4, 2, 1):
        order = [(lane + step) % LANES for lane in range(LANES)]
        vector = combine(vector, _shuffle(builder, vector, vector, order))
    return builder.extract_element(vector, _I32(0))


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _add_products(context: Any, builder: Any, is_bf16: bool, left: Any, right: Any, total: Any) -> Any:
    """total + the products of two vectors of units, given as integers."""

    def floats(*units: Any) -> list[Any]:
        return [builder.bitcast(unit, _FLOATS) for unit in units]

    if not is_bf16:
        return _call(builder, _FMA, _FLOATS, *floats(left, right), total)
    if _has_dot(context):
        pairs = [builder.bitcast(units, _PAIRS) for units in (left, right)]
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, *pairs)
    low = floats(*(builder.shl(units, _ints(16)) for units in (left, right)))
    high = floats(*(builder.and_(units, _ints(0xFFFF0000)) for units in (left, right)))
    total = _call(builder, _FMA, _FLOATS, *low, total)
    return _call(builder, _FMA, _FLOATS, *high, total)


def _rounded(context: Any, builder: Any, values: Any) -> Any:
    """bfloat16 bits of finite values, rounded to nearest, of two as near to the even one."""
    if _has_dot(context):
        return builder.fptrunc(values, ir.VectorType(_BFloat(), LANES))
    bits = builder.bitcast(values, _INTS)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    bits = builder.lshr(builder.add(builder.add(bits, odd), _ints(0x7FFF)), _ints(16))
    return builder.trunc(bits, ir.VectorType(ir.IntType(16), LANES))


def _power_of_two(builder: Any, x: Any) -> Any:
    """2^x within 3 units in the last place; exactly 0 below -126, and for -inf.

    x = k + r with |r| ≤ ½; 2^r by a polynomial of least relative error (2.4e-7), times 2^k by adding to the exponent.
    Adding 1.5·2²³ rounds to the nearest integer and leaves it in the low bits.
    """
    magic = _constant(12582912.0)
    shifted = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(shifted, magic))
    p = _constant(_EXP2[0])
    for coefficient in _EXP2[1:]:
        p = _fma(builder, p, r, _constant(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, _INTS), _ints(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(p, _INTS), exponent), _FLOATS)
    return builder.select(builder.fcmp_ordered(">", x, _constant(-126.0)), scaled, _constant(0.0))


_EXP2 = (1.32764725e-3, 9.67554189e-3, 5.55071309e-2, 2.40221202e-1, 6.93146944e-1, 1.00000012)
"""Least squares made minimax by Lawson's weights; highest power first."""
_LOG2_E = 1.4426950408889634


# Numba calls these with its own contexts, which they need not all use.
# ruff: noqa: ARG001


def _multiply(
    typing_context: Any, pool: Any, rows: Any, panels: Any, scratch: Any, left: Any, left_stride: Any,
    right: Any, panel_stride: Any, depth: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    num_rows, num_panels = rows.literal_value, panels.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, array = signature.args[3], args[3]
        left_at, left_step, right_at, panel_step, length, out_at, out_step = args[4:]

        def at(base: Any, *terms: tuple[int, Any]) -> Any:
            for count, step in terms:
                base = builder.add(base, builder.mul(_I64(count), step))
            return _address(context, builder, kind, array, base)

        places = [(row, panel) for row in range(num_rows) for panel in range(num_panels)]
        targets = [at(builder.add(out_at, _I64(LANES * panel)), (row, out_step)) for row, panel in places]
        lefts = [at(left_at, (row, left_step)) for row in range(num_rows)]
        rights = [at(right_at, (panel, panel_step)) for panel in range(num_panels)]
        before = builder.block
        loop, after = builder.append_basic_block("depth"), builder.append_basic_block("multiplied")
        builder.branch(loop)
        builder.position_at_end(loop)
        unit = builder.phi(_I64)
        unit.add_incoming(_I64(0), before)
        sums = []
        for _ in places:
            total = builder.phi(_FLOATS)
            total.add_incoming(_constant(0.0), before)
            sums.append(total)
        lanes = builder.mul(unit, _I64(LANES))
        columns = [_load(builder, builder.gep(right, [lanes]), _INTS, 64) for right in rights]
        added = []
        for row in range(num_rows):
            word = builder.load(builder.bitcast(builder.gep(lefts[row], [unit]), _I32.as_pointer()))
            broadcast = _splat(builder, word)
            for panel in range(num_panels):
                total = sums[row * num_panels + panel]
                added.append(
                    _add_products(context, builder, _is_bf16(pool), broadcast, columns[panel], total)
                )
        following = builder.add(unit, _I64(1))
        unit.add_incoming(following, builder.block)
        for total, value in zip(sums, added, strict=True):
            total.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, length), loop, after)
        builder.position_at_end(after)
        for target, value in zip(targets, added, strict=True):
            _store(builder, value, target, 64)
        return context.get_dummy_value()

    return types.void(
        pool, rows, panels, scratch, left, left_stride, right, panel_stride, depth, out, out_stride
    ), generate


def _pack_columns(
    typing_context: Any, pool: Any, rows: Any, first: Any, offset: Any, units: Any, scratch: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first_row, shift, num_units, array, start = args[2:]
        sources = _sources(context, builder, signature, args, first_row, shift, LANES)
        with cgutils.for_range_slice(builder, _I64(0), num_units, _I64(LANES)) as (unit, _):
            vectors = _load_units(builder, sources, unit, num_units)
            for lane, vector in enumerate(_transpose(builder, vectors)):
                index = builder.add(unit, _I64(lane))
                with builder.if_then(builder.icmp_signed("<", index, num_units), likely=True):
                    place = builder.add(start, builder.mul(index, _I64(LANES)))
                    _store(builder, vector, _address(context, builder, signature.args[5], array, place), 64)
        return context.get_dummy_value()

    return types.void(pool, rows, first, offset, units, scratch, target), generate


def _load_units(builder: Any, sources: list[Any], unit: Any, num_units: Any) -> list[Any]:
    """Sixteen units from `unit` on of each source; zeros beyond `num_units`, where nothing is read."""
    left = builder.sub(num_units, unit)
    addresses = [builder.gep(source, [unit]) for source in sources]
    with builder.if_else(builder.icmp_signed(">=", left, _I64(LANES)), likely=True) as (then, otherwise):
        with then:
            whole = [_load(builder, address, _INTS) for address in addresses]
            from_whole = builder.block
        with otherwise:
            numbers = ir.Constant(_INTS, list(range(LANES)))
            mask = builder.icmp_signed("<", numbers, _splat(builder, builder.trunc(left, _I32)))
            some = [
                _call(builder, "llvm.masked.load.v16i32.p0", _INTS,
                      builder.bitcast(address, _INTS.as_pointer()), _I32(4), mask, _ints(0))
                for address in addresses
            ]  # fmt: skip
            from_some = builder.block
    merged = []
    for a, b in zip(whole, some, strict=True):
        value = builder.phi(_INTS)
        value.add_incoming(a, from_whole)
        value.add_incoming(b, from_some)
        merged.append(value)
    return merged


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of sixteen vectors, by what processors have: shuffles within quarters, then of quarters."""
    quarters = range(0, LANES, 4)
    pairs = [[q + i // 2 + i % 2 * LANES + high for q in quarters for i in range(4)] for high in (0, 2)]
    halves = [[q + i % 2 + i // 2 * LANES + high for q in quarters for i in range(4)] for high in (0, 2)]
    whole = [
        [q * 4 + i for q in (first, first + 2, first + 4, first + 6) for i in range(4)] for first in (0, 1)
    ]

    def interleave(a: Any, b: Any, orders: list[list[int]]) -> list[Any]:
        return [_shuffle(builder, a, b, order) for order in orders]

    # quads[i][k] has in its quarter q the column 4q + k of rows 4i to 4i + 3.
    quads = []
    for i in quarters:
        ab, cd = (interleave(rows[i + j], rows[i + j + 1], pairs) for j in (0, 2))
        quads.append(
            [vector for low, high in zip(ab, cd, strict=True) for vector in interleave(low, high, halves)]
        )
    columns: list[Any] = [None] * LANES
    for k in range(4):
        upper, lower = (interleave(quads[i][k], quads[i + 1][k], whole) for i in (0, 2))
        for odd in (0, 1):
            columns[4 * odd + k], columns[8 + 4 * odd + k] = interleave(upper[odd], lower[odd], whole)
    return columns


def _pack_rows(
    typing_context: Any, pool: Any, rows: Any, first: Any, count: Any, offset: Any, units: Any, scratch: Any,
    target: Any, panel_stride: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first_row, num_rows, shift, num_units, array, start, step = args[2:]
        per_unit = 2 if _is_bf16(pool) else 1
        with cgutils.for_range_slice(builder, _I64(0), num_rows, _I64(per_unit)) as (row, _):
            sources = _sources(
                context, builder, signature, args, builder.add(first_row, row), shift, per_unit
            )
            depth = builder.add(start, builder.mul(builder.udiv(row, _I64(per_unit)), _I64(LANES)))
            with cgutils.for_range_slice(builder, _I64(0), num_units, _I64(LANES)) as (unit, _):
                panels = builder.mul(builder.udiv(unit, _I64(LANES)), _I64(per_unit))
                for half, vector in enumerate(_columns(builder, sources, unit, num_units)):
                    panel = builder.mul(builder.add(panels, _I64(half)), step)
                    place = builder.add(depth, panel)
                    _store(builder, vector, _address(context, builder, signature.args[6], array, place), 64)
        return context.get_dummy_value()

    return types.void(pool, rows, first, count, offset, units, scratch, target, panel_stride), generate


def _sources(
    context: Any, builder: Any, signature: Any, args: Any, first: Any, shift: Any, count: int
) -> list[Any]:
    """Where `count` rows of the pool, args[0], begin: those whose elements args[1] names from `first` on, shifted."""
    addresses = []
    for i in range(count):
        at = _address(context, builder, signature.args[1], args[1], builder.add(first, _I64(i)))
        address = _address(context, builder, signature.args[0], args[0], builder.add(builder.load(at), shift))
        addresses.append(builder.bitcast(address, _I32.as_pointer()))
    return addresses


def _columns(builder: Any, sources: list[Any], unit: Any, num_units: Any) -> list[Any]:
    """Panels of the columns from `unit` on, one unit deep: one float32 row as it is, or two bfloat16 rows zipped."""
    vectors = _load_units(builder, sources, unit, num_units)
    if len(vectors) == 1:
        return vectors
    a, b = (builder.bitcast(vector, _HALVES) for vector in vectors)
    orders = [[half * LANES + i // 2 + i % 2 * 2 * LANES for i in range(2 * LANES)] for half in (0, 1)]
    return [builder.bitcast(_shuffle(builder, a, b, order), _INTS) for order in orders]


def _fetch_rows(
    typing_context: Any, pool: Any, rows: Any, first: Any, count: Any, offset: Any, width: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first_row, num_rows, shift, size = args[2:]
        line = _I64(_LINE_BYTES // (2 if _is_bf16(pool) else 4))
        with cgutils.for_range(builder, num_rows) as loop:
            at = builder.add(first_row, loop.index)
            (source,) = _sources(context, builder, signature, args, at, shift, 1)
            with cgutils.for_range_slice(builder, _I64(0), size, line) as (element, _):
                address = builder.gep(builder.bitcast(source, pool_pointer(context, pool)), [element])
                flags = (_I32(0), _I32(2), _I32(1))
                byte = builder.bitcast(address, ir.IntType(8).as_pointer())
                _call(builder, "llvm.prefetch.p0", ir.VoidType(), byte, *flags)
        return context.get_dummy_value()

    def pool_pointer(context: Any, array: Any) -> Any:
        return context.get_data_type(array.dtype).as_pointer()

    return types.void(pool, rows, first, count, offset, width), generate


def _mix_rows(
    typing_context: Any, pool: Any, rows: Any, count: Any, first: Any, num_keys: Any, offset: Any, units: Any,
    scratch: Any, weights: Any, weight_stride: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    num_queries = count.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first_row, keys, shift, num_units, array, weight_at, weight_step, out_at, out_step = args[3:]
        kind = signature.args[7]
        per_unit = 2 if _is_bf16(pool) else 1
        chunk = 4 * LANES // per_unit
        totals = [cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(4 * num_queries)]
        lefts = [
            _address(context, builder, kind, array, builder.add(weight_at, builder.mul(_I64(i), weight_step)))
            for i in range(num_queries)
        ]
        with cgutils.for_range_slice(builder, _I64(0), num_units, _I64(chunk)) as (unit, _):
            for total in totals:
                builder.store(_constant(0.0), total)
            with cgutils.for_range_slice(builder, _I64(0), keys, _I64(per_unit)) as (key, _):
                sources = _sources(
                    context, builder, signature, args, builder.add(first_row, key), shift, per_unit
                )
                columns: list[Any] = []
                for step in range(0, chunk, LANES):
                    columns += _columns(builder, sources, builder.add(unit, _I64(step)), num_units)
                depth = builder.udiv(key, _I64(per_unit))
                for i, left in enumerate(lefts):
                    word = builder.load(builder.bitcast(builder.gep(left, [depth]), _I32.as_pointer()))
                    weight = _splat(builder, word)
                    for column, total in zip(columns, totals[4 * i : 4 * i + 4], strict=True):
                        value = _add_products(
                            context, builder, _is_bf16(pool), weight, column, builder.load(total)
                        )
                        builder.store(value, total)
            column_at = builder.add(out_at, builder.mul(unit, _I64(per_unit)))
            for i in range(num_queries):
                place = builder.add(column_at, builder.mul(_I64(i), out_step))
                for panel, total in enumerate(totals[4 * i : 4 * i + 4]):
                    address = _address(context, builder, kind, array, builder.add(place, _I64(LANES * panel)))
                    _store(builder, builder.load(total), address, 64)
        return context.get_dummy_value()

    return types.void(
        pool, rows, count, first, num_keys, offset, units, scratch, weights, weight_stride, out, out_stride
    ), generate


def _highest(typing_context: Any, scratch: Any, start: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        best = cgutils.alloca_once_value(builder, _constant(float("-inf")))
        with cgutils.for_range(builder, args[2]) as loop:
            place = builder.add(args[1], builder.mul(loop.index, _I64(LANES)))
            values = _load(builder, _address(context, builder, signature.args[0], args[0], place), _FLOATS)
            builder.store(_maximum(builder, values, builder.load(best)), best)
        return _reduce(builder, builder.load(best), lambda a, b: _maximum(builder, a, b))

    return types.float32(scratch, start, count), generate


def _cap(typing_context: Any, scratch: Any, start: Any, count: Any, inner: Any, bound: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # tanh(y) = 1 - 2 / (1 + e^2y); beyond |2y log2 e| = 60 it is ±1 in float32.
        factor, cap = _splat(builder, args[3]), _splat(builder, args[4])
        with cgutils.for_range(builder, args[2]) as loop:
            place = builder.add(args[1], builder.mul(loop.index, _I64(LANES)))
            address = _address(context, builder, signature.args[0], args[0], place)
            x = builder.fmul(_load(builder, address, _FLOATS), factor)
            x = _maximum(builder, x, _constant(-60.0))
            x = builder.select(builder.fcmp_ordered("<", x, _constant(60.0)), x, _constant(60.0))
            below = builder.fadd(_power_of_two(builder, x), _constant(1.0))
            tanh = builder.fsub(_constant(1.0), builder.fdiv(_constant(2.0), below))
            _store(builder, builder.fmul(tanh, cap), address)
        return context.get_dummy_value()

    return types.void(scratch, start, count, types.float32, types.float32), generate


def _weigh(
    typing_context: Any, pool: Any, scratch: Any, start: Any, count: Any, factor: Any, peak: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, array, first, num, by, highest, out = args
        kind = signature.args[1]
        mass = cgutils.alloca_once_value(builder, _constant(0.0))
        scale, shift = _splat(builder, by), _splat(builder, builder.fneg(highest))
        with cgutils.for_range(builder, num) as loop:
            place = builder.add(first, builder.mul(loop.index, _I64(LANES)))
            scores = _load(builder, _address(context, builder, kind, array, place), _FLOATS)
            weights = _power_of_two(builder, _fma(builder, scores, scale, shift))
            builder.store(builder.fadd(builder.load(mass), weights), mass)
            units = LANES // 2 if _is_bf16(pool) else LANES
            address = _address(
                context, builder, kind, array, builder.add(out, builder.mul(loop.index, _I64(units)))
            )
            _store(builder, _rounded(context, builder, weights) if _is_bf16(pool) else weights, address)
        return _reduce(builder, builder.load(mass), lambda a, b: builder.fadd(a, b))

    return types.float32(pool, scratch, start, count, types.float32, types.float32, target), generate


def _scale_and_add(
    typing_context: Any, scratch: Any, target: Any, count: Any, factor: Any, source: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, to, num, by, added = args
        factors = _splat(builder, by)
        with cgutils.for_range(builder, num) as loop:
            step = builder.mul(loop.index, _I64(LANES))
            place = _address(context, builder, signature.args[0], array, builder.add(to, step))
            other = _address(context, builder, signature.args[0], array, builder.add(added, step))
            sums = _load(builder, place, _FLOATS, 64)
            _store(builder, _fma(builder, sums, factors, _load(builder, other, _FLOATS, 64)), place, 64)
        return context.get_dummy_value()

    return types.void(scratch, target, count, types.float32, source), generate


def _copy_row(typing_context: Any, source: Any, index: Any, width: Any, scratch: Any, target: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = ir.Constant(_I64, 2 if _is_bf16(source) else 4)
        to = _address(context, builder, signature.args[3], args[3], args[4])
        cgutils.raw_memcpy(
            builder, to, _address(context, builder, signature.args[0], args[0], args[1]), args[2], size
        )
        return context.get_dummy_value()

    return types.void(source, index, width, scratch, target), generate


_literal: Any = intrinsic(prefer_literal=True) if HAS_COMPILER else intrinsic
multiply: Any = _literal(_multiply)
pack_columns: Any = intrinsic(_pack_columns)
pack_rows: Any = intrinsic(_pack_rows)
fetch_rows: Any = intrinsic(_fetch_rows)
mix_rows: Any = _literal(_mix_rows)
highest: Any = intrinsic(_highest)
cap: Any = intrinsic(_cap)
weigh: Any = intrinsic(_weigh)
scale_and_add: Any = intrinsic(_scale_and_add)
copy_row: Any = intrinsic(_copy_row)
