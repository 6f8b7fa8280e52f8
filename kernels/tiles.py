"""The matrix kernel of the CPU: a few rows times one panel of packed weights, all sums in vector registers.

Packed weights are *panels* of 64 columns. A panel holds, for each *unit* of the inner dimension, 64 words of 32 bits:
of each column two neighbouring bfloat16, or one float32. So it is one contiguous stream, read once for all rows of a
tile. Without prefetch instructions: the processor foresees such a stream, and measured, they made one row slower (45
GB/s without, 32 to 39 with).

A word of bfloat16 is multiplied by one instruction where the code is compiled for AVX512-BF16 (VDPBF16PS: both products
into a float32 sum), elsewhere by two float32 multiplications of its shifted halves.

Each sum goes through the inner dimension in order, in one accumulator, whatever the number of rows: a row times a
matrix is the same to the last bit in every batch.
"""

from __future__ import annotations

from typing import Any

from twinpool.kernels.compiler import cgutils, intrinsic, ir, types

# Numba calls `_tile` with its own contexts, and with types in place of values.
# ruff: noqa: ARG001

PANEL = 64
"""Columns of a panel."""
MAX_ROWS = 6
"""Rows of the largest tile: its 6 · 4 sums, 4 vectors of weights and one of x fit into the 32 registers of AVX-512."""
WORD_BYTES = 4
_LANES = 16
_VECTORS = PANEL // _LANES


def _tile(
    typing_context: Any, rows: Any, x: Any, x_at: Any, x_stride: Any, weights: Any, at: Any, units: Any,
    sums: Any, sums_at: Any,
) -> Any:  # fmt: skip
    if not isinstance(rows, types.IntegerLiteral):
        return None
    num_rows, is_pair = rows.literal_value, weights.dtype == types.uint16

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(index: int) -> Any:
            """To element args[index + 1] of the array args[index]."""
            array = context.make_array(signature.args[index])(context, builder, args[index])
            return builder.gep(array.data, [args[index + 1]])

        features = context.codegen().magic_tuple()[2].split(",")
        emitter = _Emitter(builder, is_pair, "+avx512bf16" in features)
        row_bytes = builder.mul(args[3], emitter.index(WORD_BYTES // 2 if is_pair else WORD_BYTES))
        first_row = pointer(1)
        x_rows = [emitter.moved(first_row, builder.mul(row_bytes, emitter.index(r))) for r in range(num_rows)]
        emitter.emit(x_rows, pointer(4), args[6], pointer(7))
        return context.get_dummy_value()

    number = types.int64
    return types.void(rows, x, number, number, weights, number, number, sums, number), generate


class _Emitter:
    """Writes the tile's loop as LLVM instructions: nothing a compiler has to recognise."""

    def __init__(self, builder: Any, is_pair: bool, has_pair_product: bool) -> None:
        self._builder = builder
        self._is_pair = is_pair
        self._has_pair_product = has_pair_product
        self._word = ir.IntType(8 * WORD_BYTES)
        self._words = ir.VectorType(self._word, _LANES)
        self._floats = ir.VectorType(ir.FloatType(), _LANES)
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
        here = self.moved(panel, builder.mul(unit, self.index(WORD_BYTES * PANEL)))
        vectors = [
            self._load(self.moved(here, self.index(WORD_BYTES * _LANES * vector)), self._words)
            for vector in range(_VECTORS)
        ]
        offset = builder.mul(unit, self.index(WORD_BYTES))
        results = []
        for row, row_totals in zip(x_rows, totals, strict=True):
            x = self._broadcast(self._load(self.moved(row, offset), self._word))
            results.append([self._add_product(t, w, x) for t, w in zip(row_totals, vectors, strict=True)])
        following = builder.add(unit, self.index(1))
        builder.cbranch(builder.icmp_signed("<", following, units), loop, after)
        unit.add_incoming(self.index(0), entry)
        unit.add_incoming(following, loop)
        zeros = self._floats([0.0] * _LANES)
        for row_totals, row_results in zip(totals, results, strict=True):
            for phi, result in zip(row_totals, row_results, strict=True):
                phi.add_incoming(zeros, entry)
                phi.add_incoming(result, loop)
        builder.position_at_end(after)
        flat = [result for row_results in results for result in row_results]
        for number, result in enumerate(flat):
            at = self.moved(sums, self.index(WORD_BYTES * _LANES * number))
            builder.store(result, builder.bitcast(at, self._floats.as_pointer())).align = WORD_BYTES

    def moved(self, pointer: Any, num_bytes: Any) -> Any:
        """`pointer` + `num_bytes`."""
        return self._builder.gep(self._builder.bitcast(pointer, ir.IntType(8).as_pointer()), [num_bytes])

    def _load(self, pointer: Any, kind: Any) -> Any:
        value = self._builder.load(self._builder.bitcast(pointer, kind.as_pointer()))
        value.align = WORD_BYTES // 2 if self._is_pair else WORD_BYTES
        return value

    def _broadcast(self, word: Any) -> Any:
        lone = self._builder.insert_element(self._words(ir.Undefined), word, self._word(0))
        return self._builder.shuffle_vector(lone, lone, self._words([0] * _LANES))

    def _add_product(self, total: Any, weights: Any, x: Any) -> Any:
        """total + weights · x in each lane; `weights` and `x` are words."""
        if not self._is_pair:
            return self._fused(total, weights, x)
        if self._has_pair_product:
            pairs = ir.VectorType(BFloat16(), 2 * _LANES)
            operands = self._builder.bitcast(weights, pairs), self._builder.bitcast(x, pairs)
            return self._call("llvm.x86.avx512bf16.dpbf16ps.512", total, *operands)
        shift, high = self._words([16] * _LANES), self._words([0xFFFF0000] * _LANES)
        total = self._fused(total, self._builder.shl(weights, shift), self._builder.shl(x, shift))
        return self._fused(total, self._builder.and_(weights, high), self._builder.and_(x, high))

    def _fused(self, total: Any, weights: Any, x: Any) -> Any:
        operands = (self._builder.bitcast(words, self._floats) for words in (weights, x))
        return self._call("llvm.fmuladd.v16f32", *operands, total)

    def _call(self, name: str, *args: Any) -> Any:
        kind = ir.FunctionType(self._floats, [arg.type for arg in args])
        insert: Any = cgutils.get_or_insert_function
        return self._builder.call(insert(self._builder.module, kind, name), args)


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

`x`, `weights` and `sums` are flat arrays, the first two of bfloat16 bits or of float32, the last float32. Rows of x lie
`x_stride` elements apart and hold `units` words each: an odd number of bfloat16 is filled up with a zero.
"""
