"""The matrix kernel of processors with AMX: some rows times one panel of packed weights, all sums in matrix tiles.

A panel's words lie in the order that the tile product wants: a *step* of the inner dimension is 32 elements of a row of
x and 16 words of each of the panel's 64 columns. Four tiles hold sums. A *block* is up to 32 rows by half of a panel:
two tiles of x and two of weights for four products. A *strip* is up to 16 rows by a whole panel.

Nothing here is emitted, and nobody calls it, where kernels are compiled without tiles (`amx`) or x is not bfloat16.
"""

from __future__ import annotations

from typing import Any

from twinpool.kernels.amx import ROW_BYTES, ROWS, USES_AMX, Tiles
from twinpool.kernels.compiler import cgutils, intrinsic, ir, types
from twinpool.kernels.tiles import LANES, PANEL, WORD_BYTES

# Numba calls these with its own contexts, and with types in place of values.
# ruff: noqa: ARG001

STEP = ROW_BYTES // 2
"""bfloat16 elements of a row that one product takes."""
STEP_UNITS = STEP // 2
BLOCK_ROWS = 2 * ROWS
HALF = PANEL // 2
"""Columns of a block."""
_LINE_BYTES = 64
_SUMS = 4
_ROW_OF_WORDS = PANEL * WORD_BYTES
_X, _WORDS = (4, 5), (6, 7)
"""The tiles that hold rows of x, and words. Those of x and the sums have as many rows as `use_tiles` says."""


def _use_tiles(typing_context: Any, rows: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if USES_AMX:
            of_x, of_words = (args[0], ROW_BYTES), (ROWS, ROW_BYTES)
            Tiles(builder).configure([of_x] * (_SUMS + len(_X)) + [of_words] * len(_WORDS))
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _leave_tiles(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if USES_AMX:
            Tiles(builder).release()
        return context.get_dummy_value()

    return types.void(), generate


def _clear(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if USES_AMX:
            for tile in range(_SUMS):
                Tiles(builder).zero(tile)
        return context.get_dummy_value()

    return types.void(), generate


def _add_block(
    typing_context: Any, x: Any, first_at: Any, second_at: Any, x_stride: Any, words: Any, at: Any, steps: Any,
    coming: Any, coming_at: Any, lines: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _has_products(x, words):
            emitter = _Emitter(context, builder, signature, args)
            rows = [emitter.address(0, args[at]) for at in (1, 2)]
            stride, panel = emitter.times(args[3], WORD_BYTES // 2), emitter.address(4, args[5])
            with cgutils.for_range(builder, args[6]) as loop:
                first, second = (emitter.moved(row, loop.index, ROW_BYTES) for row in rows)
                left = emitter.moved(panel, loop.index, ROWS * _ROW_OF_WORDS)
                emitter.load(_X[0], first, stride)
                emitter.load_words(_WORDS[0], left, 0)
                emitter.tiles.add_products(0, _X[0], _WORDS[0])
                emitter.load_words(_WORDS[1], left, 1)
                emitter.tiles.add_products(1, _X[0], _WORDS[1])
                emitter.load(_X[1], second, stride)
                emitter.tiles.add_products(2, _X[1], _WORDS[0])
                emitter.tiles.add_products(3, _X[1], _WORDS[1])
                emitter.fetch(7, loop.index)
        return context.get_dummy_value()

    number = types.int64
    return types.void(x, number, number, number, words, number, number, coming, number, number), generate


def _add_strip(
    typing_context: Any, x: Any, x_at: Any, x_stride: Any, words: Any, at: Any, steps: Any, coming: Any,
    coming_at: Any, lines: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _has_products(x, words):
            emitter = _Emitter(context, builder, signature, args)
            row, panel = emitter.address(0, args[1]), emitter.address(3, args[4])
            stride = emitter.times(args[2], WORD_BYTES // 2)
            with cgutils.for_range(builder, args[5]) as loop:
                here = emitter.moved(panel, loop.index, ROWS * _ROW_OF_WORDS)
                emitter.load(_X[0], emitter.moved(row, loop.index, ROW_BYTES), stride)
                for vector in range(_SUMS):
                    emitter.load_words(_WORDS[vector % 2], here, vector)
                    emitter.tiles.add_products(vector, _X[0], _WORDS[vector % 2])
                emitter.fetch(6, loop.index)
        return context.get_dummy_value()

    number = types.int64
    return types.void(x, number, number, words, number, number, coming, number, number), generate


def _put_block(typing_context: Any, sums: Any, at: Any) -> Any:
    return types.void(sums, types.int64), _putting([(0, 0), (0, 1), (1, 0), (1, 1)])


def _put_strip(typing_context: Any, sums: Any, at: Any) -> Any:
    return types.void(sums, types.int64), _putting([(0, 0), (0, 1), (0, 2), (0, 3)])


def _putting(places: list[tuple[int, int]]) -> Any:
    """Code that writes each tile of sums to its place: (which sixteen rows, which sixteen columns)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if USES_AMX:
            emitter = _Emitter(context, builder, signature, args)
            target = emitter.address(0, args[1])
            for tile, (row, column) in enumerate(places):
                offset = emitter.number(row * ROWS * _ROW_OF_WORDS + column * ROW_BYTES)
                emitter.tiles.store(tile, builder.gep(target, [offset]), emitter.number(_ROW_OF_WORDS))
        return context.get_dummy_value()

    return generate


def _has_products(x: Any, words: Any) -> bool:
    return USES_AMX and bool(x.dtype == types.uint16) and bool(words.dtype == types.uint16)


class _Emitter:
    """Addresses, as byte pointers, and the instructions that take them."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.tiles = Tiles(builder)
        self.load = self.tiles.load
        self.number = ir.IntType(64)
        self._context, self._builder, self._signature, self._args = context, builder, signature, args

    def address(self, operand: int, at: Any) -> Any:
        """Of element `at` of the flat array that is operand number `operand`."""
        array = self._context.make_array(self._signature.args[operand])
        data = array(self._context, self._builder, self._args[operand]).data
        return self._builder.bitcast(self._builder.gep(data, [at]), ir.IntType(8).as_pointer())

    def times(self, count: Any, size: int) -> Any:
        return self._builder.mul(count, self.number(size))

    def moved(self, address: Any, count: Any, size: int) -> Any:
        """`address` + count · size bytes."""
        return self._builder.gep(address, [self.times(count, size)])

    def load_words(self, tile: int, step: Any, vector: int) -> None:
        """Sixteen columns of a step of a panel."""
        start = self._builder.gep(step, [self.number(WORD_BYTES * LANES * vector)])
        self.load(tile, start, self.number(_ROW_OF_WORDS))

    def fetch(self, operand: int, step: Any) -> None:
        """Asks for the lines of a step for the second cache. Operands: an array, where in it the first step's lines
        begin, and how many there are for each step."""
        lines, start = self._args[operand + 2], self.address(operand, self._args[operand + 1])
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [start.type, flag, flag, flag])
        insert: Any = cgutils.get_or_insert_function
        function = insert(self._builder.module, kind, "llvm.prefetch.p0")
        here = self.moved(start, self._builder.mul(step, lines), _LINE_BYTES)
        with cgutils.for_range(self._builder, lines) as loop:
            address = self.moved(here, loop.index, _LINE_BYTES)
            self._builder.call(function, [address, flag(0), flag(2), flag(1)])


use_tiles: Any = intrinsic(_use_tiles)
"""`use_tiles(rows)`, in compiled code only, as all here: from now on this thread's tiles of x and of sums have `rows`
rows, 1 to 16."""
leave_tiles: Any = intrinsic(_leave_tiles)
"""`leave_tiles()`: the thread has done with its tiles."""
clear: Any = intrinsic(_clear)
"""`clear()`: all sums are zero."""
add_block: Any = intrinsic(_add_block)
"""`add_block(x, first_at, second_at, x_stride, words, at, steps, coming, coming_at, lines)`: adds to the sums the
products of two tiles of x, which begin at x[first_at] and x[second_at], and half of a panel, which begins at words[at],
in `steps` steps. Flat arrays of bfloat16 bits; rows of x lie `x_stride` elements apart. With each step memory is asked
for `lines` more cache lines from coming[coming_at] on, which need not exist."""
add_strip: Any = intrinsic(_add_strip)
"""`add_strip(x, x_at, x_stride, words, at, steps, coming, coming_at, lines)`: the same of one tile of x and a whole
panel."""
put_block: Any = intrinsic(_put_block)
"""`put_block(sums, at)`: writes a block's sums into half of the rows [32, 64] of float32 that begin at sums[at]; the
second tile's are the rows from 16 on."""
put_strip: Any = intrinsic(_put_strip)
"""`put_strip(sums, at)`: a strip's sums as rows [16, 64]."""
