"""The steps of attention whose inner loops stay in vector registers (`lanes.py`), as functions for compiled code.

They work on a flat float32 *scratch*, aligned to 64 bytes, in which offsets count units of 32 bits. Matrices on the
right of a product are *panels* of sixteen columns: of each unit of depth, sixteen units side by side. `rows` names
where rows of the pool begin, in its elements; `shift` is added to each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinpool.kernels.compiler import intrinsic, types
from twinpool.kernels.lanes import BYTES, FLOATS, I32, I64, LANES, UNITS, VOID, Emitter, cgutils, is_bf16

PANELS = 4
"""Panels that a product takes at once."""
BLOCK_ROWS = 6
"""Rows of the left matrix that it takes at once: its 6 · 4 sums, 4 vectors of the right one and one of the left fit
into the 32 registers of AVX-512."""
_LINE_UNITS = 16

# Numba calls what follows with types in place of values.
# ruff: noqa: ARG001


def _multiply(
    typing_context: Any, pool: Any, count: Any, scratch: Any, left: Any, left_stride: Any, right: Any,
    panel_stride: Any, depth: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16(pool))
        count, _, left_at, left_step, right_at, panel_step, units, out_at, out_step = args[1:]

        def emit(num_rows: int) -> None:
            lefts = [emitter.address(2, left_at, (row, left_step)) for row in range(num_rows)]
            rights = [emitter.address(2, right_at, (panel, panel_step)) for panel in range(PANELS)]
            sums = _Sums(emitter, num_rows)
            with emitter.range(units) as unit:
                lanes = builder.mul(unit, I64(LANES))
                columns = [emitter.load(builder.gep(panel, [lanes]), UNITS, 64) for panel in rights]
                sums.add([builder.gep(row, [unit]) for row in lefts], columns)
            sums.store(lambda row: emitter.address(2, out_at, (row, out_step)))

        _by_count(builder, count, emit)
        return context.get_dummy_value()

    return types.void(
        pool, count, scratch, left, left_stride, right, panel_stride, depth, out, out_stride
    ), generate


def _mix(
    typing_context: Any, pool: Any, rows: Any, count: Any, scratch: Any, left: Any, left_stride: Any, first: Any,
    num_rows: Any, shift: Any, units: Any, out: Any, out_stride: Any, ahead: Any, num_ahead: Any, ahead_shift: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16(pool))
        count, _, left_at, left_step, first, length, by, width, out_at, out_step = args[2:12]
        next_row, num_next, next_by = args[12:]
        per_unit = emitter.rows_per_unit
        # As many rows ahead as rows here, or a few more at a time, so that memory is asked for at an even pace.
        pace = builder.udiv(emitter.sum((per_unit, num_next), length, -1), length)

        def emit(num_left: int) -> None:
            lefts = [emitter.address(3, left_at, (row, left_step)) for row in range(num_left)]
            with emitter.range(width, PANELS * LANES // per_unit) as unit:
                sums = _Sums(emitter, num_left)
                with emitter.range(length, per_unit) as row:
                    depth = builder.udiv(row, I64(per_unit))
                    done = builder.mul(depth, pace)
                    left_over = builder.sub(num_next, done)
                    some = builder.select(builder.icmp_signed("<", left_over, pace), left_over, pace)
                    _fetch(emitter, emitter.sum(next_row, done), some, next_by, width)
                    sources = _sources(emitter, emitter.sum(first, row), by, per_unit)
                    columns: list[Any] = []
                    for step in range(0, PANELS * LANES // per_unit, LANES):
                        at = emitter.sum(unit, step)
                        columns += emitter.zip_rows(emitter.load_units(sources, at, width))
                    sums.add([builder.gep(row, [depth]) for row in lefts], columns)
                sums.store(lambda row: emitter.address(3, out_at, (row, out_step), (per_unit, unit)))

        _by_count(builder, count, emit)
        return context.get_dummy_value()

    return types.void(
        pool, rows, count, scratch, left, left_stride, first, num_rows, shift, units, out, out_stride, ahead,
        num_ahead, ahead_shift,
    ), generate  # fmt: skip


class _Sums:
    """Sums of some rows times PANELS panels, from 0 on. LLVM keeps them in registers."""

    def __init__(self, emitter: Emitter, num_rows: int) -> None:
        self._emitter = emitter
        zero = emitter.constant(0.0)
        self._rows = [
            [cgutils.alloca_once_value(emitter.builder, zero) for _ in range(PANELS)] for _ in range(num_rows)
        ]
        for row in self._rows:
            for place in row:
                emitter.builder.store(zero, place)

    def add(self, lefts: list[Any], columns: list[Any]) -> None:
        """Adds the products of each row's unit, at an address, and the units of all columns."""
        builder = self._emitter.builder
        for left, row in zip(lefts, self._rows, strict=True):
            unit = self._emitter.splat(self._emitter.load(left, I32))
            for place, column in zip(row, columns, strict=True):
                builder.store(self._emitter.add_products(builder.load(place), unit, column), place)

    def store(self, address: Callable[[int], Any]) -> None:
        """Writes each row's sums to where it says."""
        for number, row in enumerate(self._rows):
            start = address(number)
            for panel, place in enumerate(row):
                target = self._emitter.builder.gep(start, [I64(LANES * panel)])
                self._emitter.store(self._emitter.builder.load(place), target, 64)


def _by_count(builder: Any, count: Any, emit: Callable[[int], None]) -> None:
    """Code for each number of rows from 1 to BLOCK_ROWS, of which `count` chooses."""
    after = builder.append_basic_block("counted")
    switch = builder.switch(count, after)
    for number in range(1, BLOCK_ROWS + 1):
        block = builder.append_basic_block(f"rows_{number}")
        switch.add_case(I64(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(after)
    builder.position_at_end(after)


def _sources(emitter: Emitter, first: Any, shift: Any, count: int) -> list[Any]:
    """Addresses of `count` rows of the pool, operand 0, of those that operand 1 names from `first` on."""
    addresses = []
    for i in range(count):
        begin = emitter.builder.load(emitter.address(1, first, i))
        addresses.append(emitter.builder.bitcast(emitter.address(0, begin, shift), I32.as_pointer()))
    return addresses


def _fetch(emitter: Emitter, first: Any, count: Any, shift: Any, units: Any) -> None:
    """Asks for `count` rows' cache lines: into the second level, as the first can ask for fewer at a time."""
    with emitter.range(count) as i:
        (source,) = _sources(emitter, emitter.sum(first, i), shift, 1)
        with emitter.range(units, _LINE_UNITS) as unit:
            line = emitter.builder.bitcast(emitter.builder.gep(source, [unit]), BYTES)
            emitter.call("llvm.prefetch.p0", VOID, line, I32(0), I32(2), I32(1))


def _fetch_rows(
    typing_context: Any, pool: Any, rows: Any, first: Any, count: Any, shift: Any, units: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _fetch(Emitter(context, builder, signature, args, is_bf16(pool)), *args[2:])
        return context.get_dummy_value()

    return types.void(pool, rows, first, count, shift, units), generate


def _pack_columns(
    typing_context: Any, pool: Any, rows: Any, first: Any, shift: Any, units: Any, scratch: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16(pool))
        begin, by, width, _, place = args[2:]
        sources = _sources(emitter, begin, by, LANES)
        with emitter.range(width, LANES) as unit:
            for lane, column in enumerate(emitter.transpose(emitter.load_units(sources, unit, width))):
                depth = emitter.sum(unit, lane)
                with builder.if_then(builder.icmp_signed("<", depth, width), likely=True):
                    emitter.store(column, emitter.address(5, place, (LANES, depth)), 64)
        return context.get_dummy_value()

    return types.void(pool, rows, first, shift, units, scratch, target), generate


def _pack_rows(
    typing_context: Any, pool: Any, rows: Any, first: Any, count: Any, shift: Any, units: Any, scratch: Any,
    target: Any, panel_stride: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16(pool))
        begin, length, by, width, _, place, step = args[2:]
        per_unit = emitter.rows_per_unit
        with emitter.range(length, per_unit) as row:
            sources = _sources(emitter, emitter.sum(begin, row), by, per_unit)
            depth = emitter.sum(place, (LANES // per_unit, row))
            with emitter.range(width, LANES) as unit:
                panel = builder.mul(builder.udiv(unit, I64(LANES // per_unit)), step)
                for number, column in enumerate(emitter.zip_rows(emitter.load_units(sources, unit, width))):
                    emitter.store(column, emitter.address(6, depth, panel, (number, step)), 64)
        return context.get_dummy_value()

    return types.void(pool, rows, first, count, shift, units, scratch, target, panel_stride), generate


def _highest(typing_context: Any, scratch: Any, start: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16=False)
        best = cgutils.alloca_once_value(builder, emitter.constant(float("-inf")))
        with emitter.range(args[2]) as i:
            values = emitter.load(emitter.address(0, args[1], (LANES, i)), FLOATS)
            builder.store(emitter.maximum(values, builder.load(best)), best)
        return emitter.reduce(builder.load(best), emitter.maximum)

    return types.float32(scratch, start, count), generate


def _cap(typing_context: Any, scratch: Any, start: Any, count: Any, factor: Any, bound: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16=False)
        inner, outer, one = emitter.splat(args[3]), emitter.splat(args[4]), emitter.constant(1.0)
        # tanh(y) = 1 - 2 / (1 + e^2y), which float32 cannot tell from ±1 where e^2y is beyond 2^±60.
        low, high = emitter.constant(-60.0), emitter.constant(60.0)
        with emitter.range(args[2]) as i:
            address = emitter.address(0, args[1], (LANES, i))
            x = emitter.maximum(builder.fmul(emitter.load(address, FLOATS), inner), low)
            x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
            share = builder.fdiv(emitter.constant(2.0), builder.fadd(emitter.power_of_two(x), one))
            emitter.store(builder.fmul(builder.fsub(one, share), outer), address)
        return context.get_dummy_value()

    return types.void(scratch, start, count, types.float32, types.float32), generate


def _weigh(
    typing_context: Any, pool: Any, scratch: Any, start: Any, count: Any, factor: Any, peak: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16(pool))
        begin, num_panels, by, highest, out = args[2:]
        mass = cgutils.alloca_once_value(builder, emitter.constant(0.0))
        scale, shift = emitter.splat(by), emitter.splat(builder.fneg(highest))
        with emitter.range(num_panels) as i:
            scores = emitter.load(emitter.address(1, begin, (LANES, i)), FLOATS)
            weights = emitter.power_of_two(emitter.fma(scores, scale, shift))
            builder.store(builder.fadd(builder.load(mass), weights), mass)
            place = emitter.address(1, out, (LANES // emitter.rows_per_unit, i))
            emitter.store(emitter.rounded(weights), place)
        return emitter.reduce(builder.load(mass), builder.fadd)

    return types.float32(pool, scratch, start, count, types.float32, types.float32, target), generate


def _scale_and_add(
    typing_context: Any, scratch: Any, target: Any, count: Any, factor: Any, source: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16=False)
        factors = emitter.splat(args[3])
        with emitter.range(args[2]) as i:
            place = emitter.address(0, args[1], (LANES, i))
            added = emitter.load(emitter.address(0, args[4], (LANES, i)), FLOATS, 64)
            emitter.store(emitter.fma(emitter.load(place, FLOATS, 64), factors, added), place, 64)
        return context.get_dummy_value()

    return types.void(scratch, target, count, types.float32, source), generate


def _copy_row(typing_context: Any, source: Any, index: Any, width: Any, scratch: Any, target: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16(source))
        to, origin = emitter.address(3, args[4]), emitter.address(0, args[1])
        cgutils.raw_memcpy(builder, to, origin, args[2], I64(source.dtype.bitwidth // 8))
        return context.get_dummy_value()

    return types.void(source, index, width, scratch, target), generate


multiply: Any = intrinsic(_multiply)
"""`multiply(pool, count, scratch, left, left_stride, right, panel_stride, depth, out, out_stride)`: out[row] =
left[row] · right, for `count` ≤ BLOCK_ROWS rows, PANELS panels, `depth` ≥ 1 units. `pool` tells what a unit is."""
mix: Any = intrinsic(_mix)
"""`mix(pool, rows, count, scratch, left, left_stride, first, num_rows, shift, units, out, out_stride, ahead, num_ahead,
ahead_shift)`: out[row] = left[row] · the `num_rows` rows of the pool from `first` on, of `units` units, where they lie;
meanwhile `num_ahead` rows from `ahead` on are fetched. Same sums, in the same order, as `pack_rows` and `multiply`."""
fetch_rows: Any = intrinsic(_fetch_rows)
"""`fetch_rows(pool, rows, first, count, shift, units)` asks for rows that will be needed, without waiting for them."""
pack_columns: Any = intrinsic(_pack_columns)
"""`pack_columns(pool, rows, first, shift, units, scratch, target)`: sixteen rows as the columns of a panel."""
pack_rows: Any = intrinsic(_pack_rows)
"""`pack_rows(pool, rows, first, count, shift, units, scratch, target, panel_stride)`: `count` rows, in panels."""
highest: Any = intrinsic(_highest)
"""`highest(scratch, start, count)`: the largest of `count` vectors' floats."""
cap: Any = intrinsic(_cap)
"""`cap(scratch, start, count, factor, bound)`: x = bound · tanh(y) in `count` vectors; x · factor is 2y · log2 e."""
weigh: Any = intrinsic(_weigh)
"""`weigh(pool, scratch, start, count, factor, peak, target)`: 2^(x · factor - peak) of `count` vectors of floats,
in the pool's type at `target`. Returns their sum before rounding."""
scale_and_add: Any = intrinsic(_scale_and_add)
"""`scale_and_add(scratch, target, count, factor, source)`: target = target · factor + source, `count` vectors."""
copy_row: Any = intrinsic(_copy_row)
"""`copy_row(source, index, width, scratch, target)` copies `width` elements of another array."""
