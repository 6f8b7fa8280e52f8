"""Paged attention on the CPU, decode and prefill alike, as one compiled function that reads the pool where it lies.

Keys are taken in tiles of `KEY_TILE` positions, counted from the start of the sequence. A tile's keys and values are
brought into the order of the matrix kernel once (`lanes.py`) for all the query rows at hand, which are those of a tile
of tokens with all query heads that share the key/value head. Then, a few rows at a time: scores, online softmax,
weights, weighted values, all in a scratch that fits into the second-level cache.

A row's sums run over absolute positions in one fixed order and masked keys add exactly nothing, so a token's result is
the same, bit for bit, whatever else is in the batch, wherever chunks begin, in decode as in prefill, on any rank.

Where the processor has matrix tiles, `attention_amx.py` does each piece of the work instead, for bfloat16 and heads of
a multiple of 32 elements: all of them, because its sums have another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinpool.kernels import attention_scratch
from twinpool.kernels.amx import USES_AMX
from twinpool.kernels.attention_amx import attend_rows, takes_tiles
from twinpool.kernels.attention_places import KEY_TILE, ROOM, begin_ahead, find_ahead, find_rows
from twinpool.kernels.attention_steps import (
    BLOCK_ROWS,
    PANELS,
    cap,
    copy_row,
    fetch_rows,
    highest,
    mix,
    multiply,
    pack_columns,
    pack_rows,
    scale_and_add,
    weigh,
)
from twinpool.kernels.attention_tiles import configure, release
from twinpool.kernels.jit import exp, store
from twinpool.kernels.lanes import LANES, LOG2_E, compiled_exactly

_ROWS = 192
"""Query rows that share a packed tile of keys; more only if one token has more of one key/value head."""
_PANEL_KEYS = PANELS * LANES
_UNSEEN = np.float32(-1.0e30)
"""A row's peak before its first key. Scores of hidden keys are -inf, so that their weights are 0 even then."""
_LOG2_E = np.float32(LOG2_E)
_LN_2 = np.float32(0.6931471805599453)


def scratch_size(num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Float32 elements of scratch that `attend` needs for each rank."""
    if USES_AMX and itemsize == 2 and head_dim % 32 == 0:
        return attention_scratch.scratch_size(num_heads // num_kv_heads, head_dim)
    rows = max(_ROWS, num_heads // num_kv_heads)
    units = head_dim * itemsize // 4
    columns = -(-head_dim // _PANEL_KEYS) * _PANEL_KEYS
    packed = KEY_TILE * units + KEY_TILE * columns * itemsize // 4
    block = BLOCK_ROWS * (KEY_TILE + KEY_TILE * itemsize // 4 + columns)
    return rows * (units + LANES + columns + 2) + packed + block + 3 * LANES


@compiled_exactly
def attend(
    rank: Any, size: Any, query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any,
    layer: Any, query_starts: Any, ends: Any, block_tables: Any, table_starts: Any, scale: Any, window: Any,
    softcap: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    """Rank `rank` of `size`'s share of the attention of a packed batch: all ranks together write all of `out`.

    `query` and `pool` are flat, float32 or bfloat16 bits; `shape` is the pool's, strides count elements. The batch is
    that of `PagedBatch`, `scale` is positive, `window` and `softcap` 0 are off. `scratch`, flat float32, has
    `scratch_size` elements for each rank, which nobody else uses meanwhile. `out` is flat, [token, head, head_dim].
    The work is cut between key/value heads of tiles of tokens, in the order of the batch, into shares of equal cost.
    """
    num_kv_heads = shape[3]
    group = num_heads // num_kv_heads
    in_tiles = takes_tiles(pool, shape[5])
    most_rows = max(_ROWS, attention_scratch.ROWS // size) if in_tiles else _ROWS
    tile_tokens = max(1, most_rows // group)
    total = 0.0
    for seq in range(ends.shape[0]):
        count = query_starts[seq + 1] - query_starts[seq]
        for first in range(0, count, tile_tokens):
            total += _cost(ends[seq], count, first, tile_tokens, group, window) * num_kv_heads
    per_rank = scratch.shape[0] // size
    base = rank * per_rank
    base += -(np.int64(scratch.ctypes.data) // 4 + base) % LANES
    rows = np.empty(ROOM, np.int64)
    ahead = np.full(2, -1, np.int64)
    batch = query_starts, ends, block_tables, table_starts
    done = 0.0
    if in_tiles:
        configure(pool)
    for seq in range(ends.shape[0]):
        count = query_starts[seq + 1] - query_starts[seq]
        for first in range(0, count, tile_tokens):
            last = min(first + tile_tokens, count)
            cost = _cost(ends[seq], count, first, tile_tokens, group, window)
            begin = _first_head(rank, size, total, done, cost, num_kv_heads)
            end = _first_head(rank + 1, size, total, done, cost, num_kv_heads)
            done += cost * num_kv_heads
            together = max(1, most_rows // ((last - first) * group))
            if in_tiles:
                together = min(together, attention_scratch.MOST_HEADS)
            for head in range(begin, end, together):
                until = min(head + together, end)
                if in_tiles:
                    attend_rows(
                        query, token_stride, head_stride, num_heads, pool, shape, layer, batch, seq, first, last,
                        head, until, scale, window, softcap, scratch, base, rows, ahead, out,
                    )  # fmt: skip
                else:
                    _attend_tile(
                        query, token_stride, head_stride, num_heads, pool, shape, layer, batch, seq, first, last,
                        head, until, scale, window, softcap, scratch, base, rows, ahead, out,
                    )  # fmt: skip
    if in_tiles:
        release(pool)


@compiled_exactly
def _cost(end: Any, count: Any, first: Any, tile_tokens: Any, group: Any, window: Any) -> Any:
    """Of one key/value head of the tile of tokens from `first` on, in arbitrary units."""
    last = min(first + tile_tokens, count)
    keys = end - count + last
    if window > 0:
        keys = min(keys, window + last - first)
    return float(keys * ((last - first) * group + 5))


@compiled_exactly
def _first_head(rank: Any, size: Any, total: Any, done: Any, cost: Any, num_kv_heads: Any) -> Any:
    """The first key/value head, of a tile whose costs begin at `done`, whose middle is not before the rank's share."""
    head = np.int64(np.ceil((total * rank / size - done) / cost - 0.5))
    return min(max(head, 0), num_kv_heads) if rank < size else num_kv_heads


@compiled_exactly
def _attend_tile(
    query: Any, token_stride: Any, head_stride: Any, num_heads: Any, pool: Any, shape: Any, layer: Any, batch: Any,
    seq: Any, first: Any, last: Any, first_head: Any, last_head: Any, scale: Any, window: Any, softcap: Any,
    scratch: Any, base: Any, rows: Any, ahead: Any, out: Any,
) -> None:  # fmt: skip
    """Query tokens [first, last) of sequence `seq`, key/value heads [first_head, last_head).

    Rows are ordered by head, then token, then query head of the group. `rows` is scratch for places of 2 tiles of keys
    and a vector; `ahead` is where fetching is (`find_ahead`).
    """
    query_starts, ends, block_tables, table_starts = batch
    table = block_tables[table_starts[seq] : table_starts[seq + 1]]
    first_row, start = query_starts[seq], ends[seq] - (query_starts[seq + 1] - query_starts[seq])
    num_kv_heads, block_size, width = shape[3], shape[4], shape[5]
    group = num_heads // num_kv_heads
    per_unit = 4 // pool.itemsize
    units = width // per_unit
    query_stride = (units + LANES - 1) // LANES * LANES
    columns = (width + _PANEL_KEYS - 1) // _PANEL_KEYS * _PANEL_KEYS
    tile_rows = (last - first) * group
    num_rows = tile_rows * (last_head - first_head)
    sums = base
    keys = sums + num_rows * columns
    values = keys + KEY_TILE * units
    value_stride = KEY_TILE // per_unit * LANES
    scores = values + KEY_TILE // per_unit * columns
    weights = scores + BLOCK_ROWS * KEY_TILE
    weight_stride = KEY_TILE // per_unit
    added = weights + BLOCK_ROWS * weight_stride
    queries = added + BLOCK_ROWS * columns
    peaks = queries + num_rows * query_stride
    masses = peaks + num_rows
    shrinks = masses + num_rows
    scratch[sums:keys] = 0.0
    scratch[queries:peaks] = 0.0
    for row in range(num_rows):
        token = first_row + first + row % tile_rows // group
        head = (first_head + row // tile_rows) * group + row % group
        copy_row(
            query, token * token_stride + head * head_stride, width, scratch, queries + row * query_stride
        )
        scratch[peaks + row] = _UNSEEN
        scratch[masses + row] = 0.0
    factor = _LOG2_E if softcap > 0.0 else scale * _LOG2_E
    end = start + last
    first_key = max(0, start + first - window + 1) if window > 0 else 0
    per_head = block_size * width
    to_values = num_kv_heads * per_head
    direct = tile_rows <= BLOCK_ROWS
    low = first_key // KEY_TILE * KEY_TILE
    if direct and ahead[0] < 0:
        begin_ahead(
            ahead, seq, first_key, batch, group, BLOCK_ROWS, window, shape, layer, pool.itemsize, rows
        )
    while low < end:
        filled = min(KEY_TILE, end - low)
        skipped = max(0, first_key - low) // LANES
        panels = (filled + LANES - 1) // LANES
        find_rows(table, shape, layer, low, filled, rows)
        num_ahead = (
            find_ahead(ahead, filled, batch, group, BLOCK_ROWS, window, shape, layer, rows[KEY_TILE:])
            if direct
            else 0
        )
        for head in range(first_head, last_head):
            shift = head * per_head
            for panel in range(skipped, panels):
                at = num_ahead * (panel - skipped) // (panels - skipped)
                to = num_ahead * (panel - skipped + 1) // (panels - skipped)
                fetch_rows(pool, rows, KEY_TILE + at, to - at, shift, units)
                pack_columns(pool, rows, panel * LANES, shift, units, scratch, keys + panel * LANES * units)
            if not direct:
                skip = skipped * LANES
                pack_rows(
                    pool, rows, skip, panels * LANES - skip, to_values + shift, units, scratch,
                    values + skip // per_unit * LANES, value_stride,
                )  # fmt: skip
            head_row = (head - first_head) * tile_rows
            row = 0
            while row < tile_rows:
                count = min(BLOCK_ROWS, tile_rows - row)
                at = start + first - low
                hi = min(filled, at + (row + count - 1) // group + 1)
                lo = max(0, at + row // group - window + 1) if window > 0 else 0
                if lo < hi:
                    r = head_row + row
                    from_panel, to_panel = lo // LANES, (hi - 1) // LANES + 1
                    for group_at in range(lo // _PANEL_KEYS * _PANEL_KEYS, hi, _PANEL_KEYS):
                        _multiply(
                            pool, count, scratch, queries + r * query_stride, query_stride,
                            keys + group_at * units, LANES * units, units, scores + group_at, KEY_TILE,
                        )  # fmt: skip
                    for i in range(count):
                        position = at + (row + i) // group
                        seen = max(lo, min(filled, position + 1))
                        unseen = min(hi, max(lo, position - window + 1)) if window > 0 else 0
                        scratch[shrinks + i] = _weigh_row(
                            pool, scratch, scores + i * KEY_TILE, from_panel, to_panel, unseen, seen, factor, scale,
                            softcap, peaks + r + i, masses + r + i, weights + i * weight_stride,
                        )  # fmt: skip
                    skip = from_panel * LANES // per_unit
                    num_keys = (to_panel - from_panel) * LANES
                    if direct:
                        mix(
                            pool, rows, count, scratch, weights + skip, weight_stride, from_panel * LANES, num_keys,
                            to_values + shift, units, added, columns, KEY_TILE, num_ahead, to_values + shift,
                        )  # fmt: skip
                    else:
                        for column in range(0, columns, _PANEL_KEYS):
                            _multiply(
                                pool, count, scratch, weights + skip, weight_stride,
                                values + skip * LANES + column // LANES * value_stride, value_stride,
                                num_keys // per_unit, added + column, columns,
                            )  # fmt: skip
                    for i in range(count):
                        scale_and_add(
                            scratch, sums + (r + i) * columns, columns // LANES, scratch[shrinks + i],
                            added + i * columns,
                        )  # fmt: skip
                row += count
        low += KEY_TILE
    for row in range(num_rows):
        token = first_row + first + row % tile_rows // group
        head = (first_head + row // tile_rows) * group + row % group
        target = (token * num_heads + head) * width
        share = np.float32(1.0) / scratch[masses + row]
        for i in range(width):
            store(out, target + i, scratch[sums + row * columns + i] * share)


@compiled_exactly
def _weigh_row(
    pool: Any, scratch: Any, scores: Any, from_panel: Any, to_panel: Any, unseen: Any, seen: Any, factor: Any,
    scale: Any, softcap: Any, peak_at: Any, mass_at: Any, weights: Any,
) -> Any:  # fmt: skip
    """One step of a row's online softmax over the keys [unseen, seen) of a tile, in whole panels.

    Returns the factor for what the row has summed up so far.
    """
    begin, num_panels = scores + from_panel * LANES, to_panel - from_panel
    if softcap > 0.0:
        cap(scratch, begin, num_panels, 2 * scale * _LOG2_E / softcap, softcap)
    scratch[begin : scores + unseen] = -np.inf
    scratch[scores + seen : scores + to_panel * LANES] = -np.inf
    old = scratch[peak_at]
    peak = max(old, highest(scratch, begin, num_panels) * factor)
    mass = weigh(
        pool, scratch, begin, num_panels, factor, peak, weights + from_panel * LANES * pool.itemsize // 4
    )
    shrink = exp((old - peak) * _LN_2)
    scratch[peak_at] = peak
    scratch[mass_at] = scratch[mass_at] * shrink + mass
    return shrink


@compiled_exactly
def _multiply(
    pool: Any, count: Any, scratch: Any, left: Any, left_stride: Any, right: Any, panel_stride: Any, depth: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """One copy of `multiply`, which is long."""
    multiply(pool, count, scratch, left, left_stride, right, panel_stride, depth, out, out_stride)
