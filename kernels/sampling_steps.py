"""The steps of sampling whose inner loops stay in vector registers (`lanes.py`), as functions for compiled code.

They read flat float32 arrays in vectors of sixteen; `values` of a race in *groups* of 64, because a call of the
generator gives four tokens their noise.
"""

from __future__ import annotations

from typing import Any

from twinpool.kernels.compiler import intrinsic, ir, types
from twinpool.kernels.lanes import FLOATS, I64, LANES, LOG2_E, UNITS, Emitter, cgutils
from twinpool.kernels.sampling import KEY_STEPS, MULTIPLIERS, ROUNDS

QUAD = 4
GROUP = QUAD * LANES
_WORD = 2**32 - 1
_MANTISSA = 2.0**23
_BIAS = 127.0
_LEAST_EXPONENT = -87.0

# Numba calls what follows with types in place of values.
# ruff: noqa: ARG001


def _next_group(
    typing_context: Any, values: Any, first: Any, end: Any, floor: Any, top: Any, best: Any, key_low: Any,
    key_high: Any, place_low: Any, place_high: Any, found: Any,
) -> Any:  # fmt: skip
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16=False)
        least, peak, lead = (emitter.splat(arg) for arg in args[3:6])
        keys = [_round_keys(emitter, key, step) for key, step in zip(args[6:8], KEY_STEPS, strict=True)]
        place = [emitter.splat(builder.zext(word, I64)) for word in args[8:10]]
        group = cgutils.alloca_once_value(builder, args[2])
        with cgutils.for_range(builder, args[2], start=args[1], intp=I64) as loop:
            rows = [
                emitter.load(emitter.address(0, (GROUP, loop.index), LANES * i), FLOATS) for i in range(QUAD)
            ]
            runs = [builder.fcmp_ordered(">=", x, least) for x in rows]
            with builder.if_then(_any(builder, runs)):
                beats = []
                for x, runner, bits in zip(
                    rows, runs, _noise_bits(emitter, loop.index, place, keys), strict=True
                ):
                    bound = builder.fmul(_one_minus_uniform(emitter, bits), lead)
                    faster = builder.fcmp_ordered(
                        ">=", _weight_at_most(emitter, builder.fsub(x, peak)), bound
                    )
                    beats.append(builder.and_(runner, faster))
                with builder.if_then(_any(builder, beats), likely=False):
                    for i, beat in enumerate(beats):
                        mask = builder.bitcast(beat, ir.IntType(LANES))
                        emitter.store(builder.zext(mask, I64), emitter.address(10, i), 8)
                    builder.store(loop.index, group)
                    loop.do_break()
        return builder.load(group)

    floats, words = (types.float32,) * 3, (types.uint32,) * 4
    return types.int64(values, types.int64, types.int64, *floats, *words, found), generate


def _round_keys(emitter: Emitter, key: Any, step: int) -> list[Any]:
    builder = emitter.builder
    words = [builder.add(key, ir.Constant(key.type, step * i & _WORD)) for i in range(ROUNDS)]
    return [emitter.splat(builder.zext(word, I64)) for word in words]


def _noise_bits(emitter: Emitter, group: Any, place: list[Any], keys: list[list[Any]]) -> list[Any]:
    """Philox4x32-10 of the group's sixteen counters: 64 words in the order of their tokens. Words are the low halves of
    64-bit lanes, whose high halves are whatever the products left there."""
    builder = emitter.builder

    def wide(numbers: list[int]) -> Any:
        return ir.Constant(ir.VectorType(I64, LANES), numbers)

    low, half = wide([_WORD] * LANES), wide([32] * LANES)
    factors = [wide([factor] * LANES) for factor in MULTIPLIERS]
    numbers = emitter.splat(builder.mul(group, I64(LANES)))
    c0, c1, c2, c3 = builder.add(numbers, wide(list(range(LANES)))), *place, wide([0] * LANES)
    for key_low, key_high in zip(*keys, strict=True):
        product0 = builder.mul(builder.and_(c0, low), factors[0])
        product1 = builder.mul(builder.and_(c2, low), factors[1])
        c0 = builder.xor(builder.xor(builder.lshr(product1, half), c1), key_low)
        c2 = builder.xor(builder.xor(builder.lshr(product0, half), c3), key_high)
        c1, c3 = product1, product0
    front, back = (builder.or_(builder.and_(a, low), builder.shl(b, half)) for a, b in ((c0, c1), (c2, c3)))
    orders = [
        [i + side * LANES for i in range(at, at + QUAD) for side in (0, 1)] for at in range(0, LANES, QUAD)
    ]
    return [builder.bitcast(emitter.shuffle(front, back, order), UNITS) for order in orders]


def _one_minus_uniform(emitter: Emitter, bits: Any) -> Any:
    builder = emitter.builder
    count = builder.sitofp(builder.lshr(bits, emitter.units(8)), FLOATS)
    number = builder.fadd(count, emitter.constant(0.5))
    return emitter.fma(number, emitter.constant(-(2.0**-24)), emitter.constant(1.0))


def _weight_at_most(emitter: Emitter, x: Any) -> Any:
    """At least e^x, at most 6.2 % more: between powers of two its chord, which is what floats' bits are linear in."""
    builder = emitter.builder
    x = emitter.maximum(x, emitter.constant(_LEAST_EXPONENT))
    bits = emitter.fma(x, emitter.constant(LOG2_E * _MANTISSA), emitter.constant(_BIAS * _MANTISSA))
    return builder.bitcast(builder.fptosi(bits, UNITS), FLOATS)


def _any(builder: Any, masks: list[Any]) -> Any:
    mask = masks[0]
    for other in masks[1:]:
        mask = builder.or_(mask, other)
    bits = ir.IntType(LANES)
    return builder.icmp_unsigned("!=", builder.bitcast(mask, bits), bits(0))


def _masses(
    typing_context: Any, values: Any, count: Any, floor: Any, top: Any, border: Any, token: Any, sums: Any
) -> Any:
    doubles = ir.VectorType(ir.DoubleType(), LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16=False)
        least, peak, mine, own_id = (emitter.splat(arg) for arg in args[2:6])
        zero = ir.Constant(doubles, [0.0] * LANES)
        numbers = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]
        with emitter.range(args[1]) as i:
            x = emitter.load(emitter.address(0, (LANES, i)), FLOATS)
            weighs = builder.fcmp_ordered(">=", x, least)
            with builder.if_then(_any(builder, [weighs])):
                weight = emitter.power_of_two(builder.fmul(builder.fsub(x, peak), emitter.constant(LOG2_E)))
                mass = builder.fpext(weight, doubles)

                def add(total: Any, mask: Any) -> None:
                    added = builder.select(mask, mass, zero)
                    builder.store(builder.fadd(builder.load(total), added), total)

                add(totals[0], weighs)
                reaches = builder.fcmp_ordered(">=", x, mine)
                with builder.if_then(_any(builder, [reaches]), likely=False):
                    ids = builder.add(emitter.splat(builder.mul(i, I64(LANES))), numbers)
                    comes_first = builder.icmp_signed("<", ids, own_id)
                    is_larger = builder.fcmp_ordered(">", x, mine)
                    add(totals[1], builder.and_(reaches, builder.or_(is_larger, comes_first)))
        for place, total in enumerate(totals):
            emitter.store(emitter.reduce(builder.load(total), builder.fadd), emitter.address(6, place), 8)
        return context.get_dummy_value()

    floats = (types.float32,) * 3
    return types.void(values, types.int64, *floats, types.int64, sums), generate


def _count_from(typing_context: Any, values: Any, count: Any, floor: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16=False)
        least = emitter.splat(args[2])
        counts = cgutils.alloca_once_value(builder, emitter.units(0))
        with emitter.range(args[1]) as i:
            x = emitter.load(emitter.address(0, (LANES, i)), FLOATS)
            one = builder.zext(builder.fcmp_ordered(">=", x, least), UNITS)
            builder.store(builder.add(builder.load(counts), one), counts)
        return builder.sext(emitter.reduce(builder.load(counts), builder.add), I64)

    return types.int64(values, types.int64, types.float32), generate


def _next_from(typing_context: Any, values: Any, start: Any, count: Any, floor: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(context, builder, signature, args, is_bf16=False)
        least = emitter.splat(args[3])
        found = cgutils.alloca_once_value(builder, args[2])
        with cgutils.for_range(builder, args[2], intp=I64) as loop:
            x = emitter.load(emitter.address(0, args[1], (LANES, loop.index)), FLOATS)
            with builder.if_then(_any(builder, [builder.fcmp_ordered(">=", x, least)]), likely=False):
                builder.store(loop.index, found)
                loop.do_break()
        return builder.load(found)

    return types.int64(values, types.int64, types.int64, types.float32), generate


next_group: Any = intrinsic(_next_group)
"""`next_group(values, first, end, floor, top, best, key_low, key_high, place_low, place_high, found)`: the first
group of [first, end) with a token of at least `floor` whose ratio e^(x - top) / E may exceed `best`, or `end`. Which
tokens it has of that kind is in `found`, int64 [4]: sixteen bits each, the lowest for the first.

No token with a larger ratio is passed over if `best` is said 0.1 % too small: e^x is rounded up and E down, for
E = -log u ≥ 1 - u; so neither a logarithm nor a division is needed."""
masses: Any = intrinsic(_masses)
"""`masses(values, count, floor, top, border, token, sums)`: of `count` vectors, the sum of e^(x - top) over all of at
least `floor`, and over those that come before `token`, whose value is `border` ≥ `floor`, in the order (value, then
id); in `sums`, float64 [2]."""
count_from: Any = intrinsic(_count_from)
"""`count_from(values, count, floor)`: how many numbers of `count` vectors are at least `floor`."""
next_from: Any = intrinsic(_next_from)
"""`next_from(values, start, count, floor)`: the first of `count` vectors that has a number of at least `floor`, or
`count`."""
