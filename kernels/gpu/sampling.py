"""The next token of every row at once on a GPU, by the rule of `kernels/sampling.py` and without sorting.

1. Where there are marks, penalties and bans change the logits in place.
2. Each tile of each row finds its largest logit and runs the exponential race among all its tokens.
3. A program for each row takes the winner of its tiles. If no filter removes it, it is also the winner among those that
   the filters leave. Otherwise no token that comes after it in the order (logit, then id) is left either, so the race
   is run again among those before it, until a winner stays. How often depends on the share that the filters leave: at
   top-p 0.9 one time in ten more than once. Whether a token stays needs no order: fewer than k logits are larger, the
   mass before it is below top-p of the whole, its weight reaches min-p.

Masses are summed as integers, so they do not depend on the order of the sum and equal logits weigh exactly the same.
Noise has exactly the reference's bits. Exponentials are the hardware's (relative error about 2⁻²²), so where two tokens
of the race, or a mass and its bound, are nearer than that, the token can differ from the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinpool.kernels.gpu.variant import Variant
from twinpool.kernels.sampling import LEAST_NOISE

_LEAST_NOISE = tl.constexpr(LEAST_NOISE)
_NONE = tl.constexpr(float("-inf"))
_NO_TOKEN = tl.constexpr(2**31 - 1)
_UNIT_MASS = tl.constexpr(2.0**40)
"""A weight of 1 as an integer: 2²³ tokens of it fit 64 bits, and what 2¹⁸ roundings lose is 2⁻²² of it."""
# The words of a row's parameters: the fields of `batch_sampling.ROW`.
_TEMPERATURE, _TOP_P, _MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_REPETITION, _PRESENCE, _FREQUENCY = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_TOP_K, _FIRST_MARK, _END_MARK = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
_SEED, _POSITION = tl.constexpr(10), tl.constexpr(12)
_WORDS = tl.constexpr(14)
_MARKS, _RACE_TILE, _ROW_TILE = 256, 1024, 4096
_RACE_WARPS, _ROW_WARPS = 4, 16


def sample_rows(logits: torch.Tensor, rows: torch.Tensor, marks: torch.Tensor | None) -> torch.Tensor:
    """As `twinpool.kernels.batch_sampling.sample_rows`. Waits for nothing; launches depend on the shapes alone, and on
    whether there are marks."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    if marks is not None:
        _adjust[(num_rows,)](
            logits, rows, marks, logits.stride(0), vocab_size, BLOCK=_MARKS, num_warps=_RACE_WARPS
        )
    num_tiles = triton.cdiv(vocab_size, _RACE_TILE)
    best = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    ids = torch.empty(2, num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    _race[(num_rows, num_tiles)](
        logits, rows, best, ids, logits.stride(0), vocab_size, TILE=_RACE_TILE, num_warps=_RACE_WARPS
    )
    _choose[(num_rows,)](
        logits, rows, best, ids, out, logits.stride(0), vocab_size, num_tiles,
        TILES=triton.next_power_of_2(num_tiles), TILE=_ROW_TILE, num_warps=_ROW_WARPS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["marks"])  # they lie behind any number of rows
def _adjust(
    logits: tl.tensor, rows: tl.tensor, marks: tl.tensor, row_stride: tl.tensor, vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    words = rows + row * _WORDS
    repetition, presence = _float_word(words + _REPETITION), _float_word(words + _PRESENCE)
    frequency = _float_word(words + _FREQUENCY)
    first, end = tl.load(words + _FIRST_MARK), tl.load(words + _END_MARK)
    for start in range(first, end, BLOCK):
        mark = start + tl.arange(0, BLOCK)
        token = tl.load(marks + 2 * mark, mask=mark < end, other=vocab_size)
        seen = tl.load(marks + 2 * mark + 1, mask=mark < end, other=0)
        pointers = logits + row.to(tl.int64) * row_stride + token
        x = tl.load(pointers, mask=token < vocab_size, other=0.0).to(tl.float32)
        times = (seen // 2).to(tl.float32)
        x = tl.where(x > 0.0, x / repetition, x * repetition) - frequency * times
        x = tl.where(seen < 0, _NONE, tl.where(times > 0.0, x - presence, x))
        tl.store(pointers, x.to(logits.dtype.element_ty), mask=token < vocab_size)


@triton.jit
def _race(
    logits: tl.tensor, rows: tl.tensor, best: tl.tensor, ids: tl.tensor, row_stride: tl.tensor,
    vocab_size: tl.tensor, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Leaves of each tile in `best` [2, rows, tiles] the largest logit and the winner's ratio with weights relative to
    it, and in `ids`, likewise, whose they are."""
    row, start = tl.program_id(0), tl.program_id(1) * TILE
    words = rows + row * _WORDS
    temperature = _float_word(words + _TEMPERATURE)
    x = _scaled(logits + row.to(tl.int64) * row_stride, start, vocab_size, temperature, TILE)
    high = tl.max(x, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    second = tl.num_programs(0) * tl.num_programs(1)
    tl.store(best + at, high)
    tl.store(ids + at, start + tl.argmax(x, 0))
    if temperature > 0.0:
        ratio = _weight(x, high) / _noise(words, start, TILE)
        tl.store(best + second + at, tl.max(ratio, 0))
        tl.store(ids + second + at, start + tl.argmax(ratio, 0))


@triton.jit
def _choose(
    logits: tl.tensor, rows: tl.tensor, best: tl.tensor, ids: tl.tensor, out: tl.tensor, row_stride: tl.tensor,
    vocab_size: tl.tensor, num_tiles: tl.tensor, TILES: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    words = rows + row * _WORDS
    logits += row.to(tl.int64) * row_stride
    tile = tl.arange(0, TILES)
    at = row * num_tiles + tile
    second = tl.num_programs(0) * num_tiles
    highs = tl.load(best + at, mask=tile < num_tiles, other=_NONE)
    high = tl.max(highs, 0)
    if _float_word(words + _TEMPERATURE) > 0.0:
        ratios = tl.load(best + second + at, mask=tile < num_tiles, other=-1.0) * _weight(highs, high)
        winners = tl.load(ids + second + at, mask=tile < num_tiles, other=0)
        token = tl.min(tl.where(ratios == tl.max(ratios, 0), winners, _NO_TOKEN), 0)
        # A row without a finite logit has no winner; it gets token 0, as from the reference.
        token = tl.where(token < vocab_size, token, 0)
        top_k, top_p = tl.load(words + _TOP_K), _float_word(words + _TOP_P)
        if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (_float_word(words + _MIN_P) > 0.0):
            token = _winner_that_stays(logits, words, token, high, vocab_size, TILE)
    else:
        tops = tl.load(ids + at, mask=tile < num_tiles, other=0)
        token = tl.min(tl.where(highs == high, tops, _NO_TOKEN), 0)
        token = tl.where(token < vocab_size, token, 0)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _winner_that_stays(
    logits: tl.tensor, words: tl.tensor, token: tl.tensor, high: tl.tensor, vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`token`, the winner among all, or that among those that the filters leave; `high` is the largest logit."""
    temperature, top_p = _float_word(words + _TEMPERATURE), _float_word(words + _TOP_P)
    min_p, top_k = _float_word(words + _MIN_P), tl.load(words + _TOP_K)
    if (top_k <= 0) | (top_k > vocab_size):
        top_k = vocab_size
    floor = tl.minimum(high, _NONE)
    if (top_p < 1.0) & (top_k < vocab_size):
        floor = _kth_largest(
            logits, temperature, top_k, vocab_size, TILE
        )  # top-p is of the mass of the top k
    settled = 0
    while settled == 0:
        mine = tl.load(logits + token).to(tl.float32)
        if temperature != 1.0:
            mine = tl.div_rn(mine, temperature)
        higher = tl.zeros((TILE,), tl.int32)
        before, whole = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
        for start in range(0, vocab_size, TILE):
            x = _scaled(logits, start, vocab_size, temperature, TILE)
            mass = (_weight(x, high) * _UNIT_MASS).to(tl.int64)
            higher += (x > mine).to(tl.int32)
            before += tl.where(_comes_before(x, start, mine, token, TILE), mass, 0)
            whole += tl.where(x >= floor, mass, 0)
        mass_before = tl.sum(before, 0)
        bound = top_p.to(tl.float64) * tl.sum(whole, 0).to(tl.float64)
        in_nucleus = (top_p >= 1.0) | (mass_before == 0) | (mass_before.to(tl.float64) < bound)
        if (tl.sum(higher, 0) < top_k) & in_nucleus & (_weight(mine, high) >= min_p):
            settled = 1
        else:
            best, following = -1.0, token
            for start in range(0, vocab_size, TILE):
                x = _scaled(logits, start, vocab_size, temperature, TILE)
                weight = _weight(x, high)
                runs = _comes_before(x, start, mine, token, TILE) & (x >= floor) & (weight >= min_p)
                if tl.max(runs.to(tl.int32), 0) > 0:
                    ratio = tl.where(runs, weight / _noise(words, start, TILE), -1.0)
                    fastest = tl.max(ratio, 0)
                    following = tl.where(fastest > best, start + tl.argmax(ratio, 0), following)
                    best = tl.maximum(best, fastest)
            token = following
            if best < 0.0:  # nobody ran: only if the logits are not finite
                settled = 1
    return token


@triton.jit
def _kth_largest(
    logits: tl.tensor, temperature: tl.tensor, k: tl.tensor, vocab_size: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """By its bits, eight at a time from the highest: how many logits have which digit, among those that share all
    digits before it."""
    digits = tl.arange(0, 256)
    prefix = k * 0
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, vocab_size, TILE):
            keys = _sortable(_scaled(logits, start, vocab_size, temperature, TILE))
            shares = ((keys >> shift) >> 8) == prefix.to(tl.uint32, bitcast=True)
            shares &= start + tl.arange(0, TILE) < vocab_size
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=shares)
        digit = tl.sum((tl.cumsum(counts, 0, reverse=True) >= k).to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        prefix = (prefix << 8) | digit
    bits = tl.where(prefix < 0, prefix ^ -(2**31), ~prefix)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sortable(x: tl.tensor) -> tl.tensor:
    """Unsigned numbers in the order of the float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -(2**31)).to(tl.uint32, bitcast=True)


@triton.jit
def _comes_before(
    x: tl.tensor, start: tl.tensor, mine: tl.tensor, token: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Whether each of the tile's tokens comes before `token`, whose logit is `mine`, in the filters' order."""
    return (x > mine) | ((x == mine) & (start + tl.arange(0, TILE) < token))


@triton.jit
def _scaled(
    logits: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """The tile's logits over the temperature; -inf beyond the row's end, and for what is not a number."""
    i = start + tl.arange(0, TILE)
    x = tl.load(logits + i, mask=i < vocab_size, other=0.0).to(tl.float32)
    if (temperature > 0.0) & (temperature != 1.0):
        x = tl.div_rn(x, temperature)
    return tl.where((i < vocab_size) & (x == x), x, _NONE)


@triton.jit
def _weight(x: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.exp(x - tl.where(high > _NONE, high, 0.0))


@triton.jit
def _float_word(pointer: tl.tensor) -> tl.tensor:
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _noise(words: tl.tensor, start: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The row's exponential variables for the tokens from `start`, a multiple of four."""
    low = tl.load(words + _SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + _SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    quads = start // 4 + tl.arange(0, TILE // 4)
    place_low = tl.load(words + _POSITION) + 0 * quads
    place_high = tl.load(words + _POSITION + 1) + 0 * quads
    w0, w1, w2, w3 = tl.philox((high << 32) | low, quads, place_low, place_high, 0 * quads)
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)) >> 8
    uniform = (bits.to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 2⁻²⁴
    return tl.maximum(-_log(uniform), _LEAST_NOISE)


@triton.jit
def _log(x: tl.tensor) -> tl.tensor:
    """As `kernels/jit.py`'s. The hardware's logarithm has no correct bits left near 1, where the winners' noise is."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    m = (bits - (k << 23)).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = 1.0 / 7.0 + square * (1.0 / 9.0)
    series = 1.0 / 3.0 + square * (0.2 + square * series)
    return k.to(tl.float32) * 0.6931472 + (s + s) + (s + s) * square * series


def _variants(dtype: str) -> tuple[Variant, ...]:
    row = {"logits": f"*{dtype}", "rows": "*i32"}
    sizes = {"row_stride": "i32", "vocab_size": "i32"}
    partial = {"best": "*fp32", "ids": "*i32"}
    choice = {"out": "*i64", **sizes, "num_tiles": "i32"}
    return (
        Variant(
            _adjust,
            dtype,
            row | {"marks": "*i32"} | sizes,
            {"BLOCK": _MARKS},
            ("row_stride", "vocab_size"),
            _RACE_WARPS,
        ),
        Variant(
            _race,
            dtype,
            row | partial | sizes,
            {"TILE": _RACE_TILE},
            ("row_stride", "vocab_size"),
            _RACE_WARPS,
        ),
        Variant(
            _choose,
            dtype,
            row | partial | choice,
            {"TILES": 128, "TILE": _ROW_TILE},
            ("row_stride", "vocab_size"),
            _ROW_WARPS,
        ),
    )


VARIANTS = tuple(variant for dtype in ("fp32", "bf16") for variant in _variants(dtype))
