"""The steps of attention in matrix tiles (`amx.py`), as functions for compiled code.

As in `attention_steps.py`, offsets count units of 32 bits in a flat float32 *scratch*, aligned to 64 bytes; a unit is
two bfloat16. A tile is 16 rows of 16 units. Keys come in *steps* of 32, of which unit j pairs keys j and 16 + j.

Scores are [keys, 16 rows of queries]: keys lie as they are in the pool, maxima and exponentials need no neighbours.
Weights are then turned round, to multiply values. A product of tiles is the same, bit for bit, either way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinpool.kernels.amx import ROW_BYTES as LINE
from twinpool.kernels.amx import ROWS, USES_AMX, Tiles
from twinpool.kernels.compiler import intrinsic, ir, types
from twinpool.kernels.lanes import (
    BYTES,
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    LANES,
    UNITS,
    Emitter,
    cgutils,
    is_bf16,
)

TILE = LANES * LANES
"""Units of a tile."""
STEP_KEYS = 32
TILE_DIMS = 16
"""Of the values in one tile; of queries and keys, two to a unit, a tile has twice as many."""
MOST_TOGETHER = 4
"""Tiles that a product sums up at once: there are eight."""
_POWER = (9.58285294e-3, 5.59064262e-2, 2.40240991e-1, 6.93124175e-1, 1.0)
"""2^r on [-½, ½] within 3e-6, a thousandth of the weights' rounding, and exactly 1 at 0; the highest power first."""
_ROUNDING = 0x8000

# Numba calls what follows with types in place of values.
# ruff: noqa: ARG001


def takes(pool: Any) -> bool:
    """Whether there are tiles here for the elements of the numba type `pool`."""
    return USES_AMX and is_bf16(pool)


class _Step(Emitter):
    """An emitter with tiles; the scratch is operand 0."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        super().__init__(context, builder, signature, args, is_bf16=True)
        self.tiles = Tiles(builder)

    def place(self, *steps: Any) -> Any:
        """Byte pointer to unit Σ steps of the scratch."""
        return self.builder.bitcast(self.address(0, *steps), BYTES)

    def load_tile(self, tile: int, *steps: Any) -> None:
        """Reads a tile that lies in one piece."""
        self.tiles.load(tile, self.place(*steps), I64(LINE))

    def store_tile(self, tile: int, *steps: Any) -> None:
        """Writes a tile in one piece."""
        self.tiles.store(tile, self.place(*steps), I64(LINE))

    def vector(self, *steps: Any) -> Any:
        """Sixteen floats of the scratch."""
        return self.load(self.address(0, *steps), FLOATS, 64)

    def put(self, value: Any, *steps: Any) -> None:
        """Writes a vector to the scratch."""
        self.store(value, self.address(0, *steps), 64)

    def between(self, first: Any, end: Any) -> Any:
        """`with step.between(first, end) as (i, _)`: a loop."""
        return cgutils.for_range_slice(self.builder, first, end, I64(1))

    def variable(self, value: Any) -> Any:
        """A place on the stack that holds `value` now; LLVM keeps it in a register."""
        place = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, place)
        return place

    def power_of_two(self, x: Any) -> Any:
        """2^x for x ≤ 127, within 3e-6 of itself; exactly 0 from -127 on down, and exactly 1 for 0."""
        builder, magic = self.builder, self.constant(12582912.0)
        x = self.maximum(x, self.constant(-127.0))
        shifted = builder.fadd(x, magic)
        r = builder.fsub(x, builder.fsub(shifted, magic))
        p = self.constant(_POWER[0])
        for coefficient in _POWER[1:]:
            p = self.fma(p, r, self.constant(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, UNITS), self.units(23))
        return builder.bitcast(builder.add(builder.bitcast(p, UNITS), exponent), FLOATS)


def _configure(typing_context: Any, pool: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if takes(pool):
            Tiles(builder).configure([(ROWS, LINE)] * 8)
        return context.get_dummy_value()

    return types.void(pool), generate


def _release(typing_context: Any, pool: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if takes(pool):
            Tiles(builder).release()
        return context.get_dummy_value()

    return types.void(pool), generate


def _pack_queries(
    typing_context: Any, scratch: Any, source: Any, units: Any, first: Any, end: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        origin, width, low, high, to = args[1:]
        numbers = UNITS(list(range(LANES)))
        low, high = (step.splat(builder.trunc(bound, I32)) for bound in (low, high))
        kept = builder.and_(builder.icmp_signed(">=", numbers, low), builder.icmp_signed("<", numbers, high))
        with step.range(width, LANES) as unit:
            rows = [step.load(step.address(0, origin, (row, width), unit), UNITS) for row in range(LANES)]
            for number, column in enumerate(step.transpose(rows)):
                column = builder.select(kept, column, step.units(0))
                step.put(column, to, (LANES, unit), number * LANES)
        return context.get_dummy_value()

    number = types.int64
    return types.void(scratch, number, number, number, number, number), generate


def _pack_keys(
    typing_context: Any, scratch: Any, pool: Any, rows: Any, first: Any, shift: Any, units: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        begin, by, width, to = args[3:]
        for row in range(ROWS):
            source = _row(step, begin, row, by)
            with step.range(width, LANES) as unit:
                step.put(step.load(builder.gep(source, [unit]), UNITS), to, (LANES, unit), row * LANES)
        return context.get_dummy_value()

    number = types.int64
    return types.void(scratch, pool, rows, number, number, number, number), generate


def _pack_values(
    typing_context: Any, scratch: Any, pool: Any, rows: Any, first: Any, shift: Any, units: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        begin, by, width, to = args[3:]
        pairs = [[8 * q + odd + i // 2 + i % 2 * 32 for q in range(4) for i in range(8)] for odd in (0, 4)]
        for row in range(ROWS):
            sources = [_row(step, begin, row + half, by) for half in (0, ROWS)]
            with step.range(width, LANES) as unit:
                a, b = (
                    builder.bitcast(step.load(builder.gep(source, [unit]), UNITS), HALVES)
                    for source in sources
                )
                for tile, order in enumerate(pairs):
                    zipped = builder.bitcast(step.shuffle(a, b, order), UNITS)
                    step.put(zipped, to, (2 * LANES, unit), tile * TILE + row * LANES)
        return context.get_dummy_value()

    number = types.int64
    return types.void(scratch, pool, rows, number, number, number, number), generate


def _row(step: _Step, first: Any, number: int, shift: Any) -> Any:
    """Address of a row of the pool, operand 1, of those that operand 2 names from `first` on."""
    begin = step.builder.load(step.address(2, first, number))
    return step.builder.bitcast(step.address(1, begin, shift), I32.as_pointer())


def _score(
    typing_context: Any, scratch: Any, keys: Any, head_step: Any, count: Any, num_heads: Any, depth: Any,
    queries: Any, query_step: Any, scores: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        left, left_step, number, heads, deep, right, right_step, out = args[1:]

        def emit(count: int) -> None:
            for i in range(count):
                step.tiles.zero(i)
            with step.range(heads) as head, step.range(deep) as k:
                step.load_tile(4, right, (head, right_step), (k, TILE))
                for i in range(count):
                    step.load_tile(
                        5 + i % 3, left, (head, left_step), (builder.add(builder.mul(deep, I64(i)), k), TILE)
                    )
                    step.tiles.add_products(i, 5 + i % 3, 4)
            for i in range(count):
                step.store_tile(i, out, i * TILE)

        _by_count(builder, number, emit)
        return context.get_dummy_value()

    return types.void(scratch, *[types.int64] * 8), generate


def _mix(
    typing_context: Any,
    scratch: Any,
    weights: Any,
    num_steps: Any,
    values: Any,
    value_step: Any,
    count: Any,
    sums: Any,
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        left, steps, right, right_step, number, out = args[1:]

        def emit(count: int) -> None:
            for i in range(count):
                step.load_tile(i, out, i * TILE)
            with step.range(steps) as s:
                step.load_tile(4, left, (s, TILE))
                for i in range(count):
                    step.load_tile(5 + i % 3, right, (s, right_step), i * TILE)
                    step.tiles.add_products(i, 4, 5 + i % 3)
            for i in range(count):
                step.store_tile(i, out, i * TILE)

        _by_count(builder, number, emit)
        return context.get_dummy_value()

    return types.void(scratch, *[types.int64] * 6), generate


def _by_count(builder: Any, count: Any, emit: Callable[[int], None]) -> None:
    """Code for each number of tiles from 1 to MOST_TOGETHER, of which `count` chooses."""
    after = builder.append_basic_block("counted")
    switch = builder.switch(count, after)
    for number in range(1, MOST_TOGETHER + 1):
        block = builder.append_basic_block(f"tiles_{number}")
        switch.add_case(I64(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(after)
    builder.position_at_end(after)


def _hide(
    typing_context: Any, scratch: Any, scores: Any, first: Any, end: Any, at: Any, places: Any, window: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        here, begin, stop, zero, rows, width = args[1:]
        newest = step.vector(rows)
        oldest = builder.fsub(newest, step.splat(width))
        hidden = step.constant(float("-inf"))
        with step.between(begin, stop) as (key, _):
            place = step.splat(builder.sitofp(builder.sub(key, zero), F32))
            is_hidden = builder.or_(
                builder.fcmp_ordered(">", place, newest), builder.fcmp_ordered("<=", place, oldest)
            )
            step.put(builder.select(is_hidden, hidden, step.vector(here, (key, LANES))), here, (key, LANES))
        return context.get_dummy_value()

    return types.void(scratch, *[types.int64] * 5, types.float32), generate


def _weigh(
    typing_context: Any, scratch: Any, scores: Any, num_steps: Any, factor: Any, peaks: Any, masses: Any, shrinks: Any,
    weights: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        here, steps, by, peaks, masses, shrinks, to = args[1:]
        tops = [step.variable(step.constant(float("-inf"))) for _ in range(4)]
        with step.range(steps) as s:
            for key in range(STEP_KEYS):
                top = tops[key % 4]
                builder.store(
                    step.maximum(step.vector(here, (s, 2 * TILE), key * LANES), builder.load(top)), top
                )
        a, b, c, d = (builder.load(top) for top in tops)
        factors, old = step.splat(by), step.vector(peaks)
        top = step.maximum(step.maximum(a, b), step.maximum(c, d))
        peak = step.maximum(builder.fmul(top, factors), old)
        shrink = step.power_of_two(builder.fsub(old, peak))
        shift = builder.fneg(peak)
        totals = [step.variable(step.constant(0.0)) for _ in range(4)]
        with step.range(steps) as s:
            pairs = []
            for pair in range(ROWS):
                bits = []
                for half in (0, 1):
                    score = step.vector(here, (s, 2 * TILE), (pair + half * ROWS) * LANES)
                    weight = step.power_of_two(step.fma(score, factors, shift))
                    total = totals[pair % 2 * 2 + half]
                    builder.store(builder.fadd(builder.load(total), weight), total)
                    bits.append(builder.add(builder.bitcast(weight, UNITS), step.units(_ROUNDING)))
                low, high = (
                    builder.lshr(bits[0], step.units(16)),
                    builder.and_(bits[1], step.units(0xFFFF0000)),
                )
                pairs.append(builder.or_(low, high))
            for row, units in enumerate(step.transpose(pairs)):
                step.put(units, to, (s, TILE), row * LANES)
        a, b, c, d = (builder.load(total) for total in totals)
        mass = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        step.put(step.fma(step.vector(masses), shrink, mass), masses)
        step.put(peak, peaks)
        step.put(shrink, shrinks)
        has_shrunk = builder.fcmp_unordered("!=", shrink, step.constant(1.0))
        lanes = ir.IntType(LANES)
        return builder.icmp_unsigned("!=", builder.bitcast(has_shrunk, lanes), lanes(0))

    number = types.int64
    return types.boolean(scratch, number, number, types.float32, *[number] * 4), generate


def _rescale(
    typing_context: Any, scratch: Any, sums: Any, num_tiles: Any, first: Any, end: Any, factors: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        here, tiles, begin, stop, by = args[1:]
        with step.between(begin, stop) as (row, _):
            factor = step.splat(step.load(step.address(0, by, row), F32))
            with step.range(tiles) as tile:
                place = here, (tile, TILE), (row, LANES)
                step.put(builder.fmul(step.vector(*place), factor), *place)
        return context.get_dummy_value()

    return types.void(scratch, *[types.int64] * 5), generate


def _finish(
    typing_context: Any, scratch: Any, sums: Any, num_tiles: Any, row: Any, mass: Any, out: Any, target: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature, args)
        here, tiles, number, whole, _, to = args[1:]
        share = step.splat(builder.fdiv(F32(1.0), step.load(step.address(0, whole), F32)))
        with step.range(tiles, 2) as tile:
            a, b = (
                builder.fmul(step.vector(here, (tile, TILE), (number, LANES), i * TILE), share)
                for i in (0, 1)
            )
            for half in (0, 1):
                order = [i % 4 + (i // 8 + 2 * half) * 4 + i // 4 % 2 * LANES for i in range(LANES)]
                place = step.address(5, to, (tile, LANES), half * LANES)
                step.store(step.rounded(step.shuffle(a, b, order)), place, 2)
        return context.get_dummy_value()

    number = types.int64
    return types.void(scratch, number, number, number, number, out, number), generate


configure: Any = intrinsic(_configure)
"""`configure(pool)` makes this thread's tiles ready, whole ones, if `takes(pool)`."""
release: Any = intrinsic(_release)
"""`release(pool)` gives them back."""
pack_queries: Any = intrinsic(_pack_queries)
"""`pack_queries(scratch, source, units, first, end, target)`: sixteen rows of `units` units as columns, zeros but for
the rows [first, end)."""
pack_keys: Any = intrinsic(_pack_keys)
"""`pack_keys(scratch, pool, rows, first, shift, units, target)`: sixteen rows of the pool as tiles."""
pack_values: Any = intrinsic(_pack_values)
"""`pack_values(scratch, pool, rows, first, shift, units, target)`: the rows of a step, in pairs, as tiles. Of 32
neighbours the first tile has those whose number's bit 2 is 0, the second the others; `finish` puts them in order."""
score: Any = intrinsic(_score)
"""`score(scratch, keys, head_step, count, num_heads, depth, queries, query_step, scores)`: `count` ≤ MOST_TOGETHER
tiles of scores, each the sum over `num_heads` heads of keys and queries, `depth` tiles deep; keys follow each other."""
mix: Any = intrinsic(_mix)
"""`mix(scratch, weights, num_steps, values, value_step, count, sums)`: sums += weights · values, for `count` ≤
MOST_TOGETHER tiles of values in each step."""
hide: Any = intrinsic(_hide)
"""`hide(scratch, scores, first, end, at, places, window)`: -inf where a row at place p, a float, does not see key
[first, end), which is if key - `at` is not in (p - window, p]."""
weigh: Any = intrinsic(_weigh)
"""`weigh(scratch, scores, num_steps, factor, peaks, masses, shrinks, weights)`: a step of sixteen online softmaxes
over the scores of some steps of keys. Returns whether any of `shrinks`, the factors for what was summed up before, is
not 1."""
rescale: Any = intrinsic(_rescale)
"""`rescale(scratch, sums, num_tiles, first, end, factors)`: rows [first, end) of the sums times their factors."""
finish: Any = intrinsic(_finish)
"""`finish(scratch, sums, num_tiles, row, mass, out, target)`: a row of the sums divided by its mass, rounded."""
