"""The next token of every row of a batch on a CPU, in one compiled call, by the rule of `kernels/sampling.py` and
without sorting.

All tokens that top-k leaves race. If the winner is in the nucleus, it is also the winner among those that top-p leaves;
otherwise no token after it in the order (logit, then id) is in the nucleus either, and the race is run again among
those before it. The likeliest token always stays and starts each race in the lead. Sixty-four tokens at once are then
passed over unless a bound of one's ratio exceeds the leader's: of n tokens some log n are looked at closely.

Noise has the reference's bits, up to the logarithm's last ones; masses are sums in float64 of weights within 3 units in
the last place of float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinpool.kernels.attention_steps import highest
from twinpool.kernels.jit import bits_of_float, exp, float_of_bits, log
from twinpool.kernels.lanes import LANES, compiled_exactly
from twinpool.kernels.sampling import KEY_STEPS, LEAST_NOISE, MULTIPLIERS, ROUNDS
from twinpool.kernels.sampling_steps import GROUP, QUAD, count_from, masses, next_from, next_group

_SLACK = 0.999
"""What `next_group` needs to pass nobody over."""
_MULTIPLIER_0, _MULTIPLIER_1 = MULTIPLIERS
_KEY_STEP_0, _KEY_STEP_1 = KEY_STEPS
_LOW_BITS = 0x7FFFFFFF
_NONE = -np.inf


@compiled_exactly
def choose_rows(logits: Any, stride: Any, vocab_size: Any, rows: Any, marks: Any, out: Any) -> None:
    """The token of each row to `out`, int64; `logits` is flat, its rows `stride` apart. Else as `sample_rows`."""
    scaled = np.full((vocab_size + GROUP - 1) // GROUP * GROUP, _NONE, np.float32)
    sums = np.zeros(2)
    for r in range(rows.shape[0]):
        row, start = rows[r], r * stride
        _adjust(logits, start, vocab_size, row, marks)
        if row.temperature > np.float32(0.0):
            for i in range(vocab_size):
                scaled[i] = logits[start + i] / row.temperature
            out[r] = _sample(scaled, vocab_size, row, sums)
        else:
            out[r] = _first_largest(logits, start, vocab_size)


@compiled_exactly
def _adjust(logits: Any, start: Any, vocab_size: Any, row: Any, marks: Any) -> None:
    """Penalties and bans: `adjust_reference` in place."""
    for i in range(row.first_mark, min(row.end_mark, len(marks))):  # a captured step samples without marks
        token, seen = marks[i, 0], marks[i, 1]
        if token >= vocab_size:
            continue
        x, times = logits[start + token], np.float32(seen // 2)
        if seen < 0:
            x = np.float32(_NONE)
        else:
            x = x / row.repetition if x > np.float32(0.0) else x * row.repetition
            x -= times * row.frequency
            if times > np.float32(0.0):
                x -= row.presence
        logits[start + token] = x


@compiled_exactly
def _first_largest(values: Any, start: Any, size: Any) -> Any:
    """The lowest place of the largest of `size` numbers; 0 if none is above -inf."""
    num_vectors = size // LANES
    largest = highest(values, start, num_vectors)
    for i in range(num_vectors * LANES, size):
        largest = max(largest, values[start + i])
    for i in range(next_from(values, start, num_vectors, largest) * LANES, size):
        if values[start + i] == largest:
            return i
    return 0


@compiled_exactly
def _sample(scaled: Any, vocab_size: Any, row: Any, sums: Any) -> Any:
    """The token of a row of logits over the temperature, filled up with -inf to whole groups."""
    likeliest = _first_largest(scaled, 0, scaled.shape[0])
    top, floor = scaled[likeliest], np.float32(_NONE)
    if not top > floor:
        return 0  # as from the reference
    if 0 < row.top_k < vocab_size:
        floor = _border_of_top(scaled, top, row.top_k)
    border, end = floor, vocab_size
    while True:
        token = _race(scaled, likeliest, border, end, row)
        if token == likeliest or row.top_p >= np.float32(1.0):
            return token
        masses(scaled, scaled.shape[0] // LANES, floor, top, scaled[token], token, sums)
        if sums[1] < row.top_p * sums[0]:
            return token
        border, end = scaled[token], token


@compiled_exactly
def _border_of_top(scaled: Any, top: Any, k: Any) -> Any:
    """A number that the k largest and those equal to the last of them reach, and no others: by bisection of the
    numbers' bits, read as integers in the numbers' order."""
    low, high = _key(np.float32(_NONE)), _key(top) + 1
    while high - low > 1:
        middle = (low + high) // 2
        count = count_from(scaled, scaled.shape[0] // LANES, _of_key(middle))
        if count < k:
            high = middle
        else:
            low = middle
            if count == k:
                break
    return _of_key(low)


@compiled_exactly
def _key(x: Any) -> Any:
    bits = np.int32(bits_of_float(x))
    return np.int64(bits if bits >= 0 else bits ^ np.int32(_LOW_BITS))


@compiled_exactly
def _of_key(key: Any) -> Any:
    return float_of_bits(np.int32(key if key >= 0 else key ^ _LOW_BITS))


@compiled_exactly
def _race(scaled: Any, likeliest: Any, border: Any, end: Any, row: Any) -> Any:
    """The winner among the tokens above `border`, or on it with ids before `end`, whose weights reach min-p."""
    top, num_groups = scaled[likeliest], scaled.shape[0] // GROUP
    key_low, key_high = np.uint32(row.seed), np.uint32(row.seed >> np.uint64(32))
    place_low, place_high = np.uint32(row.position), np.uint32(row.position >> np.uint64(32))
    floor = border
    if row.min_p > np.float32(0.0):
        # A little lower than the weight's border, for this is but a bound.
        lowest = top + np.log(np.float64(row.min_p)) - 1e-3 - 1e-6 * abs(top)
        floor = max(floor, np.float32(lowest))
    words = _philox(np.uint32(likeliest // QUAD), place_low, place_high, np.uint32(0), key_low, key_high)
    best, winner = np.float32(1.0) / _exponential(words[likeliest % QUAD]), likeliest
    group, found = 0, np.empty(GROUP // LANES, np.int64)
    while True:
        group = next_group(
            scaled, group, num_groups, floor, top, best * np.float32(_SLACK), key_low, key_high, place_low, place_high,
            found,
        )  # fmt: skip
        if group == num_groups:
            return winner
        for i in range(GROUP):
            if found[i // LANES] >> (i % LANES) & 1 == 0:
                continue
            token = group * GROUP + i
            x = scaled[token]
            weight = exp(x - top)
            if (x > border or (x == border and token < end)) and weight >= row.min_p:
                words = _philox(
                    np.uint32(token // QUAD), place_low, place_high, np.uint32(0), key_low, key_high
                )
                ratio = weight / _exponential(words[i % QUAD])
                if ratio > best or (ratio == best and token < winner):
                    best, winner = ratio, token
        group += 1


@compiled_exactly
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    for _ in range(ROUNDS):
        product0 = np.uint64(c0) * np.uint64(_MULTIPLIER_0)
        product1 = np.uint64(c2) * np.uint64(_MULTIPLIER_1)
        c0 = np.uint32(np.uint32(product1 >> np.uint64(32)) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(product0 >> np.uint64(32)) ^ c3 ^ k1)
        c1, c3 = np.uint32(product1), np.uint32(product0)
        k0 = np.uint32(k0 + np.uint32(_KEY_STEP_0))
        k1 = np.uint32(k1 + np.uint32(_KEY_STEP_1))
    return c0, c1, c2, c3


@compiled_exactly
def _exponential(word: Any) -> Any:
    uniform = (np.float32(word >> np.uint32(8)) + np.float32(0.5)) * np.float32(2.0**-24)
    return max(-log(uniform), np.float32(LEAST_NOISE))
