"""Attention in matrix tiles, where `amx.py` allows them: of bfloat16, with heads of a multiple of 32 elements.

The order of work is that of `attention_cpu.py`: a tile of keys, brought into the order of the products once, serves all
query rows at hand. Here rows come in *columns* of sixteen, which are one side of a tile. Of a prompt, a column has rows
of one head; in decode, where a head has few rows, those of several, so that one exponential serves them all.

A row's sums are the same either way: of 32 keys, the products of the first sixteen are summed in order, and those of
the others; both sums are added, and the result to what was there. Hidden keys add exactly nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinpool.kernels.attention_places import KEY_TILE, begin_ahead, find_ahead, find_rows
from twinpool.kernels.attention_scratch import AT_ONCE, lay_out, scores_of, weights_of
from twinpool.kernels.attention_steps import cap, copy_row, fetch_rows
from twinpool.kernels.attention_tiles import (
    MOST_TOGETHER,
    STEP_KEYS,
    TILE,
    TILE_DIMS,
    finish,
    hide,
    mix,
    pack_keys,
    pack_queries,
    pack_values,
    rescale,
    score,
    takes,
    weigh,
)
from twinpool.kernels.compiler import overload
from twinpool.kernels.lanes import LANES, LOG2_E, compiled_exactly

_UNSEEN = np.float32(-1.0e30)
_NOWHERE = np.float32(-1.0e9)
"""The place of a row that does not exist: it sees no key."""
_LOG2_E = np.float32(LOG2_E)


# Numba wants all of a function's parameters in what it is replaced by.
# ruff: noqa: ARG001


def takes_tiles(pool: Any, width: Any) -> bool:
    """Whether attention over `pool`, flat, with heads of `width` elements is computed here; in kernels only."""
    raise NotImplementedError("only compiled code calls this")


@overload(takes_tiles, inline="always")
def _takes_tiles(pool: Any, width: Any) -> Any:
    def has_whole_tiles(pool: Any, width: Any) -> Any:
        return width % (2 * TILE_DIMS) == 0

    def has_none(pool: Any, width: Any) -> Any:
        return False

    return has_whole_tiles if takes(pool) else has_none


def attend_rows(
    query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any, layer: Any, batch: Any,
    seq: Any, first: Any, last: Any, first_head: Any, last_head: Any, scale: Any, window: Any, softcap: Any,
    scratch: Any, base: Any, rows: Any, ahead: Any, out: Any,
) -> None:  # fmt: skip
    """As `attention_cpu._attend_tile`; only where `takes_tiles`, between `configure` and `release`."""
    raise NotImplementedError("only compiled code calls this")


@overload(attend_rows)
def _attend_rows_of(
    query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any, layer: Any, batch: Any,
    seq: Any, first: Any, last: Any, first_head: Any, last_head: Any, scale: Any, window: Any, softcap: Any,
    scratch: Any, base: Any, rows: Any, ahead: Any, out: Any,
) -> Any:  # fmt: skip
    if takes(pool):
        return _attend_rows
    return _attend_nothing


def _attend_nothing(
    query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any, layer: Any, batch: Any,
    seq: Any, first: Any, last: Any, first_head: Any, last_head: Any, scale: Any, window: Any, softcap: Any,
    scratch: Any, base: Any, rows: Any, ahead: Any, out: Any,
) -> None:  # fmt: skip
    """What is compiled where there are no tiles."""


def _attend_rows(
    query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any, layer: Any, batch: Any,
    seq: Any, first: Any, last: Any, first_head: Any, last_head: Any, scale: Any, window: Any, softcap: Any,
    scratch: Any, base: Any, rows: Any, ahead: Any, out: Any,
) -> None:  # fmt: skip
    """Query tokens [first, last) of sequence `seq`, key/value heads [first_head, last_head).

    Compiled as `attend_rows`."""
    query_starts, ends, block_tables, table_starts = batch
    table = block_tables[table_starts[seq] : table_starts[seq + 1]]
    first_token = query_starts[seq] + first
    start = ends[seq] - (query_starts[seq + 1] - query_starts[seq]) + first
    end = start + last - first
    group = num_heads // shape[3]
    work = lay_out(base, group, (last - first) * group, last_head - first_head, shape[5])
    _load_queries(
        work, query, token_stride, head_stride, first_token, first_head * group, shape[5] // 2, scratch
    )
    is_short = work.rows <= LANES
    first_key = max(0, start - window + 1) if window > 0 else 0
    if is_short and ahead[0] < 0:
        begin_ahead(ahead, seq, first_key, batch, group, LANES, window, shape, layer, pool.itemsize, rows)
    low = first_key // KEY_TILE * KEY_TILE
    while low < end:
        filled = min(KEY_TILE, end - low)
        find_rows(table, shape, layer, low, filled, rows)
        num_ahead = 0
        if is_short:
            num_ahead = find_ahead(ahead, filled, batch, group, LANES, window, shape, layer, rows[KEY_TILE:])
        for head in range(0, work.heads, work.together):
            until = min(head + work.together, work.heads)
            if is_short:
                _attend_column(
                    work, head, until, first_head, pool, shape, rows, start - low, filled, num_ahead, scale, window,
                    softcap, scratch,
                )  # fmt: skip
            else:
                skipped = max(0, first_key - low) // STEP_KEYS
                _attend_columns(
                    work, head, first_head, pool, shape, rows, start - low, skipped, filled, scale, window, softcap,
                    scratch,
                )  # fmt: skip
        low += KEY_TILE
    for head in range(work.heads):
        column = head // work.together * work.columns
        for row in range(work.rows):
            token, own = first_token + row // group, (first_head + head) * group + row % group
            number = row // LANES
            lane = head % work.together * work.rows + row % LANES
            finish(
                scratch, work.sums + (head * work.columns + number) * work.tiles * TILE, work.tiles, lane,
                work.masses + (column + number) * LANES + lane, out, (token * num_heads + own) * shape[5],
            )  # fmt: skip


@compiled_exactly
def _load_queries(
    work: Any, query: Any, token_stride: Any, head_stride: Any, first_token: Any, first_head: Any, units: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Queries as tiles; nothing summed up yet."""
    scratch[work.sums : work.queries] = 0.0
    scratch[work.places : work.peaks] = _NOWHERE
    scratch[work.peaks : work.masses] = _UNSEEN
    scratch[work.masses : work.shrinks] = 0.0
    for head in range(work.heads):
        for number in range(work.columns):
            column = head // work.together * work.columns + number
            lane = head % work.together * work.rows
            first_row = number * LANES
            count = min(LANES, work.rows - first_row)
            scratch[work.buffer : work.buffer + LANES * units] = 0.0
            for i in range(count):
                token, own = (first_row + i) // work.group, (first_row + i) % work.group
                copy_row(
                    query, (first_token + token) * token_stride + (first_head + head * work.group + own) * head_stride,
                    2 * units, scratch, work.buffer + (lane + i) * units,
                )  # fmt: skip
                scratch[work.places + column * LANES + lane + i] = token
            to = work.queries + (head * work.columns + number) * work.depth * TILE
            pack_queries(scratch, work.buffer, units, lane, lane + count, to)


@compiled_exactly
def _steps(work: Any, number: Any, at: Any, filled: Any, window: Any) -> Any:
    """The steps [first, end) of a tile of keys that rows of a column see; none if that is (0, 0)."""
    oldest = at + number * LANES // work.group
    newest = at + (min(work.rows, (number + 1) * LANES) - 1) // work.group
    low = max(0, oldest - window + 1) if window > 0 else 0
    high = min(filled, newest + 1)
    if low >= high:
        return 0, 0
    return low // STEP_KEYS, (high - 1) // STEP_KEYS + 1


@compiled_exactly
def _hide(
    work: Any, number: Any, column: Any, scores: Any, first: Any, end: Any, at: Any, scale: Any, window: Any,
    softcap: Any, scratch: Any,
) -> Any:  # fmt: skip
    """Bounds the scores of a column over the steps [first, end), hides what its rows do not see.

    Returns the factor that makes them exponents of two."""
    if softcap > 0.0:
        at_first = scores + first * STEP_KEYS * LANES
        cap(scratch, at_first, (end - first) * STEP_KEYS, 2 * scale * _LOG2_E / softcap, softcap)
    begin = max(first * STEP_KEYS, at + number * LANES // work.group + 1)
    newest = at + (min(work.rows, (number + 1) * LANES) - 1) // work.group
    if window > 0 and newest - window >= first * STEP_KEYS:
        begin = first * STEP_KEYS
    width = np.float32(window) if window > 0 else np.float32(np.inf)
    hide(scratch, scores, begin, end * STEP_KEYS, at, work.places + column * LANES, width)
    return _LOG2_E if softcap > 0.0 else scale * _LOG2_E


@compiled_exactly
def _attend_columns(
    work: Any, head: Any, first_head: Any, pool: Any, shape: Any, rows: Any, at: Any, skipped: Any, filled: Any,
    scale: Any, window: Any, softcap: Any, scratch: Any,
) -> None:  # fmt: skip
    """One head's columns over one tile of keys, from step `skipped` on."""
    units, value_step = shape[5] // 2, work.tiles * TILE
    key_shift = (first_head + head) * shape[4] * shape[5]
    value_shift = key_shift + shape[3] * shape[4] * shape[5]
    for step in range(skipped, (filled + STEP_KEYS - 1) // STEP_KEYS):
        for tile in range(2 * step, 2 * step + 2):
            pack_keys(
                scratch, pool, rows, tile * LANES, key_shift, units, work.keys + tile * work.depth * TILE
            )
        pack_values(
            scratch, pool, rows, step * STEP_KEYS, value_shift, units, work.values + step * value_step
        )
    for begin in range(0, work.columns, AT_ONCE):
        numbers = range(begin, min(begin + AT_ONCE, work.columns))
        for number in numbers:
            first, end = _steps(work, number, at, filled, window)
            _score(work, first, end, 1, head * work.columns + number, scores_of(work, number), scratch)
        for number in numbers:
            first, end = _steps(work, number, at, filled, window)
            column, scores = head * work.columns + number, scores_of(work, number)
            if first < end:
                factor = _hide(work, number, column, scores, first, end, at, scale, window, softcap, scratch)
                has_shrunk = _weigh(
                    scratch, scores + first * 2 * TILE, end - first, factor, work.peaks + column * LANES,
                    work.masses + column * LANES, work.shrinks, weights_of(work, number),
                )  # fmt: skip
                if has_shrunk:
                    count = min(LANES, work.rows - number * LANES)
                    rescale(scratch, work.sums + column * value_step, work.tiles, 0, count, work.shrinks)
        for number in numbers:
            first, end = _steps(work, number, at, filled, window)
            sums = work.sums + (head * work.columns + number) * value_step
            if first < end:
                _mix(work, weights_of(work, number), first, end - first, work.values, sums, scratch)


@compiled_exactly
def _attend_column(
    work: Any, head: Any, end_head: Any, first_head: Any, pool: Any, shape: Any, rows: Any, at: Any, filled: Any,
    num_ahead: Any, scale: Any, window: Any, softcap: Any, scratch: Any,
) -> None:  # fmt: skip
    """The heads [head, end_head), of one column, over one tile of keys; meanwhile `num_ahead` keys are fetched."""
    first, end = _steps(work, 0, at, filled, window)
    if first == end:
        return
    units, value_step = shape[5] // 2, work.tiles * TILE
    per_head, per_tile = shape[4] * shape[5], KEY_TILE * units
    to_values = shape[3] * per_head
    for own in range(head, end_head):
        shift = (first_head + own) * per_head
        keys, values = work.keys + (own - head) * per_tile, work.values + (own - head) * per_tile
        for step in range(first, end):
            next_at = num_ahead * (step - first) // (end - first)
            count = num_ahead * (step - first + 1) // (end - first) - next_at
            fetch_rows(pool, rows, KEY_TILE + next_at, count, shift, units)
            for tile in range(2 * step, 2 * step + 2):
                pack_keys(scratch, pool, rows, tile * LANES, shift, units, keys + tile * work.depth * TILE)
            fetch_rows(pool, rows, KEY_TILE + next_at, count, to_values + shift, units)
            pack_values(
                scratch, pool, rows, step * STEP_KEYS, to_values + shift, units, values + step * value_step
            )
    column = head // work.together
    _score(work, first, end, end_head - head, head, work.scores, scratch)
    factor = _hide(work, 0, column, work.scores, first, end, at, scale, window, softcap, scratch)
    has_shrunk = _weigh(
        scratch, work.scores + first * 2 * TILE, end - first, factor, work.peaks + column * LANES,
        work.masses + column * LANES, work.shrinks, work.weights,
    )  # fmt: skip
    for own in range(head, end_head):
        sums, lane = work.sums + own * value_step, (own - head) * work.rows
        if has_shrunk:
            rescale(scratch, sums, work.tiles, lane, lane + work.rows, work.shrinks)
        values = work.values + (own - head) * per_tile
        _mix(work, work.weights, first, end - first, values, sums, scratch)


@compiled_exactly
def _score(work: Any, first: Any, end: Any, num_heads: Any, column: Any, scores: Any, scratch: Any) -> None:
    """Scores over the steps [first, end) of the column whose first head's queries are number `column`."""
    per_query = work.depth * TILE
    for tile in range(2 * first, 2 * end, MOST_TOGETHER):
        score(
            scratch, work.keys + tile * per_query, KEY_TILE // LANES * per_query, min(MOST_TOGETHER, 2 * end - tile),
            num_heads, work.depth, work.queries + column * per_query, per_query, scores + tile * TILE,
        )  # fmt: skip


@compiled_exactly
def _mix(work: Any, weights: Any, first: Any, num_steps: Any, values: Any, sums: Any, scratch: Any) -> None:
    """Adds weighted values of the steps from `first` on."""
    value_step = work.tiles * TILE
    for tile in range(0, work.tiles, MOST_TOGETHER):
        mix(
            scratch, weights, num_steps, values + first * value_step + tile * TILE, value_step,
            min(MOST_TOGETHER, work.tiles - tile), sums + tile * TILE,
        )  # fmt: skip


@compiled_exactly
def _weigh(
    scratch: Any, scores: Any, num_steps: Any, factor: Any, peaks: Any, masses: Any, shrinks: Any, weights: Any,
) -> Any:  # fmt: skip
    """One copy of `weigh`, which is long."""
    return weigh(scratch, scores, num_steps, factor, peaks, masses, shrinks, weights)
