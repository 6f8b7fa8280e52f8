"""The matrix kernel of the CPU: a few rows times one panel of packed weights, all sums in vector registers.

Packed weights are *panels* of 64 columns. A panel holds, for each *unit* of the inner dimension, 64 words of 32 bits:
of each column two neighbouring bfloat16, or one float32. So it is one contiguous stream, read once for all rows of a
tile. Without prefetch instructions: the processor foresees such a stream, and measured, they made one row slower (45
GB/s without, 32 to 39 with).

Packed as integers, weights are bytes. Words are made of them, exactly (bfloat16 holds every integer up to 256), either
in registers, for each tile, or once for all of a panel's tiles (`widen`): the words are the same. Of each 64
bytes of a pair of elements, the first 8 of every 16 are those of four columns of one vector, the last 8 of the next
vector: so two words of 16 bits are put together within 128 bits, where processors have shuffles for it.

A word of bfloat16 is multiplied by one instruction where the code is compiled for AVX512-BF16 (VDPBF16PS: both products
into a float32 sum), elsewhere by two float32 multiplications of its shifted halves.

Each sum goes through the inner dimension in order, in one accumulator, whatever the number of rows: a row times a
matrix is the same to the last bit in every batch.
"""

from __future__ import annotations

import struct
from typing import Any

from twinpool.kernels.compiler import cgutils, intrinsic, ir, types

# Numba calls `_tile` with its own contexts, and with types in place of values.
# ruff: noqa: ARG001

PANEL = 64
"""Columns of a panel."""
MAX_ROWS = 6
"""Rows of the largest tile: its 6 · 4 sums, 4 vectors of weights and one of x fit into the 32 registers of AVX-512."""
WORD_BYTES = 4
LANES = 16
"""Of the vectors: columns that one register holds words of."""
_VECTORS = PANEL // LANES
_BITS_OF_INTEGERS = [struct.unpack(">H", struct.pack(">f", number)[:2])[0] for number in range(128)]
"""Of 0 to 127 as bfloat16."""


def _tile(
    typing_context: Any, rows: Any, x: Any, x_at: Any, x_stride: Any, weights: Any, at: Any, units: Any,
    sums: Any, sums_at: Any,
) -> Any:  # fmt: skip
    if not isinstance(rows, types.IntegerLiteral):
        return None
    num_rows, is_pair = rows.literal_value, x.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = _Emitter(context, builder, is_pair, weights.dtype == types.int8)
        row_bytes = builder.mul(args[3], emitter.index(WORD_BYTES // 2 if is_pair else WORD_BYTES))
        first_row = _pointer(context, builder, signature, args, 1)
        x_rows = [emitter.moved(first_row, builder.mul(row_bytes, emitter.index(r))) for r in range(num_rows)]
        panel, target = (_pointer(context, builder, signature, args, index) for index in (4, 7))
        emitter.emit(x_rows, panel, args[6], target)
        return context.get_dummy_value()

    number = types.int64
    return types.void(rows, x, number, number, weights, number, number, sums, number), generate


def _widen(typing_context: Any, weights: Any, at: Any, units: Any, words: Any, words_at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if weights.dtype == types.int8:
            emitter = _Emitter(context, builder, words.dtype == types.uint16, True)
            panel, target = (_pointer(context, builder, signature, args, index) for index in (0, 3))
            emitter.emit_words(panel, args[2], target)
        return context.get_dummy_value()

    number = types.int64
    return types.void(weights, number, number, words, number), generate


def _pointer(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    """To element args[index + 1] of the array args[index]."""
    array = context.make_array(signature.args[index])(context, builder, args[index])
    return builder.gep(array.data, [args[index + 1]])


class _Emitter:
    """Writes the tile's loop as LLVM instructions: nothing a compiler has to recognise."""

    def __init__(self, context: Any, builder: Any, is_pair: bool, is_integer: bool) -> None:
        self._builder = builder
        self._is_pair = is_pair
        self._is_integer = is_integer
        features = context.codegen().magic_tuple()[2].split(",")
        self._has_pair_product = "+avx512bf16" in features
        self._has_byte_table = "+avx512vbmi" in features
        self._word = ir.IntType(8 * WORD_BYTES)
        self._words = ir.VectorType(self._word, LANES)
        self._floats = ir.VectorType(ir.FloatType(), LANES)
        self._bytes = ir.VectorType(ir.IntType(8), 64)
        self.index = ir.IntType(64)

    def emit(self, x_rows: list[Any], panel: Any, units: Any, sums: Any) -> None:
        """Sums of all units, at least one, of each row and column: float32 [rows, 64] at `sums`."""
        builder = self._builder
        entry, loop = builder.block, builder.append_basic_block("unit")
        after = builder.append_basic_block("after_units")
        builder.branch(loop)
        builder.position_at_end(loop)
        unit = builder.phi(self.index)
        totals = [[builder.phi(self._floats) for _ in range(_VECTORS)] for _ in x_rows]
        vectors = self._unit_words(panel, unit)
        offset = builder.mul(unit, self.index(WORD_BYTES))
        results = []
        for row, row_totals in zip(x_rows, totals, strict=True):
            x = self._broadcast(self._load(self.moved(row, offset), self._word))
            results.append([self._add_product(t, w, x) for t, w in zip(row_totals, vectors, strict=True)])
        following = builder.add(unit, self.index(1))
        builder.cbranch(builder.icmp_signed("<", following, units), loop, after)
        unit.add_incoming(self.index(0), entry)
        unit.add_incoming(following, loop)
        zeros = self._floats([0.0] * LANES)
        for row_totals, row_results in zip(totals, results, strict=True):
            for phi, result in zip(row_totals, row_results, strict=True):
                phi.add_incoming(zeros, entry)
                phi.add_incoming(result, loop)
        builder.position_at_end(after)
        flat = [result for row_results in results for result in row_results]
        for number, result in enumerate(flat):
            at = self.moved(sums, self.index(WORD_BYTES * LANES * number))
            builder.store(result, builder.bitcast(at, self._floats.as_pointer())).align = WORD_BYTES

    def emit_words(self, panel: Any, units: Any, words: Any) -> None:
        """The words of all units, at least one, at `words`."""
        builder = self._builder
        entry, loop = builder.block, builder.append_basic_block("unit")
        after = builder.append_basic_block("after_units")
        builder.branch(loop)
        builder.position_at_end(loop)
        unit = builder.phi(self.index)
        here = self.moved(words, builder.mul(unit, self.index(WORD_BYTES * PANEL)))
        for number, vector in enumerate(self._unit_words(panel, unit)):
            at = self.moved(here, self.index(WORD_BYTES * LANES * number))
            builder.store(vector, builder.bitcast(at, self._words.as_pointer())).align = WORD_BYTES
        following = builder.add(unit, self.index(1))
        builder.cbranch(builder.icmp_signed("<", following, units), loop, after)
        unit.add_incoming(self.index(0), entry)
        unit.add_incoming(following, loop)
        builder.position_at_end(after)

    def _unit_words(self, panel: Any, unit: Any) -> list[Any]:
        """The words of one unit of a panel, a vector for each 16 columns."""
        per_column = WORD_BYTES if not self._is_integer else 2 if self._is_pair else 1
        here = self.moved(panel, self._builder.mul(unit, self.index(per_column * PANEL)))
        if not self._is_integer:
            places = (self.moved(here, self.index(WORD_BYTES * LANES * vector)) for vector in range(_VECTORS))
            return [self._load(place, self._words) for place in places]
        loaded = [
            self._load_bytes(self.moved(here, self.index(at))) for at in range(0, per_column * PANEL, PANEL)
        ]
        if not self._is_pair:
            return [self._as_floats(loaded[0], range(at, at + LANES)) for at in range(0, PANEL, LANES)]
        if self._has_byte_table:
            return [words for integers in loaded for words in self._looked_up(integers)]
        return [self._paired(integers, place) for integers in loaded for place in (0, 8)]

    def _load_bytes(self, pointer: Any) -> Any:
        value = self._builder.load(self._builder.bitcast(pointer, self._bytes.as_pointer()))
        value.align = 1
        return value

    def _as_floats(self, integers: Any, places: Any) -> Any:
        """The bytes at 16 `places` as float32, as their bits."""
        chosen = self._builder.shuffle_vector(integers, self._bytes(ir.Undefined), self._words(list(places)))
        floats = self._builder.sitofp(self._builder.sext(chosen, self._words), self._floats)
        return self._builder.bitcast(floats, self._words)

    def _paired(self, integers: Any, first: int) -> Any:
        """Words of the eight bytes from `first` on of each 16. The lower half of these floats' bits is 0."""
        places = [16 * quarter + first + byte for quarter in range(4) for byte in range(0, 8, 2)]
        low = self._as_floats(integers, places)
        high = self._as_floats(integers, [place + 1 for place in places])
        return self._builder.or_(self._builder.lshr(low, self._words([16] * LANES)), high)

    def _looked_up(self, integers: Any) -> list[Any]:
        """Both vectors of words of 64 bytes: either half of |integer| as bfloat16 is looked up (VPERMI2B), the upper
        one gets the sign, and the halves are put together within each 16 bytes (VPUNPCKLBW, VPUNPCKHBW)."""
        builder = self._builder
        magnitude = self._call("llvm.abs.v64i8", integers, ir.IntType(1)(0), kind=self._bytes)
        halves = []
        for shift in (0, 8):
            table = [(bits >> shift) & 0xFF for bits in _BITS_OF_INTEGERS]
            first, second = self._bytes(table[:64]), self._bytes(table[64:])
            halves.append(
                self._call("llvm.x86.avx512.vpermi2var.qi.512", first, magnitude, second, kind=self._bytes)
            )
        low, high = halves
        high = builder.or_(high, builder.and_(integers, self._bytes([0x80] * 64)))
        both = [
            [
                16 * quarter + first + byte + half
                for quarter in range(4)
                for byte in range(8)
                for half in (0, 64)
            ]
            for first in (0, 8)
        ]
        kind = ir.VectorType(ir.IntType(32), 64)
        return [
            builder.bitcast(builder.shuffle_vector(low, high, kind(places)), self._words) for places in both
        ]

    def moved(self, pointer: Any, num_bytes: Any) -> Any:
        """`pointer` + `num_bytes`."""
        return self._builder.gep(self._builder.bitcast(pointer, ir.IntType(8).as_pointer()), [num_bytes])

    def _load(self, pointer: Any, kind: Any) -> Any:
        value = self._builder.load(self._builder.bitcast(pointer, kind.as_pointer()))
        value.align = WORD_BYTES // 2 if self._is_pair else WORD_BYTES
        return value

    def _broadcast(self, word: Any) -> Any:
        lone = self._builder.insert_element(self._words(ir.Undefined), word, self._word(0))
        return self._builder.shuffle_vector(lone, lone, self._words([0] * LANES))

    def _add_product(self, total: Any, weights: Any, x: Any) -> Any:
        """total + weights · x in each lane; `weights` and `x` are words."""
        if not self._is_pair:
            return self._fused(total, weights, x)
        if self._has_pair_product:
            pairs = ir.VectorType(BFloat16(), 2 * LANES)
            operands = self._builder.bitcast(weights, pairs), self._builder.bitcast(x, pairs)
            return self._call("llvm.x86.avx512bf16.dpbf16ps.512", total, *operands)
        shift, high = self._words([16] * LANES), self._words([0xFFFF0000] * LANES)
        total = self._fused(total, self._builder.shl(weights, shift), self._builder.shl(x, shift))
        return self._fused(total, self._builder.and_(weights, high), self._builder.and_(x, high))

    def _fused(self, total: Any, weights: Any, x: Any) -> Any:
        operands = (self._builder.bitcast(words, self._floats) for words in (weights, x))
        return self._call("llvm.fmuladd.v16f32", *operands, total)

    def _call(self, name: str, *args: Any, kind: Any = None) -> Any:
        function = ir.FunctionType(kind or self._floats, [arg.type for arg in args])
        insert: Any = cgutils.get_or_insert_function
        return self._builder.call(insert(self._builder.module, function, name), args)


class BFloat16(ir.Type if ir is not None else object):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


tile: Any = intrinsic(_tile)
"""`tile(rows, x, x_at, x_stride, weights, at, units, sums, sums_at)`, in compiled code only: the sums [rows, 64] of
`rows` (a literal, 1 to MAX_ROWS) rows of `x` times the panel that starts at weights[at].

`x`, `weights` and `sums` are flat arrays, the first two of bfloat16 bits or of float32, the last float32; `weights` can
be int8 instead. Rows of x lie `x_stride` elements apart and hold `units` words each: an odd number of bfloat16 is
filled up with a zero.
"""
widen: Any = intrinsic(_widen)
"""`widen(weights, at, units, words, words_at)`, in compiled code only: the panel of int8 that starts at weights[at], as
words at words[words_at]. Flat arrays; `words` holds bfloat16 bits or float32, as x does. Of other panels it makes
nothing: they are words."""
