"""Where in the pool a sequence's keys and values lie, and which of them decode will need next."""

from __future__ import annotations

from typing import Any

from twinpool.kernels.lanes import LANES, compiled_exactly

KEY_TILE = 128
"""Positions whose keys and values are worked on together, counted from the start of the sequence."""
_WHOLE = 2 * LANES
ROOM = 2 * KEY_TILE + _WHOLE
"""Places of two tiles, and what `find_rows` adds."""
_AHEAD_BYTES = 1 << 17
"""How far ahead of decode keys and values are fetched: enough for memory, and a part of the second-level cache."""


@compiled_exactly
def find_rows(table: Any, shape: Any, layer: Any, low: Any, filled: Any, rows: Any) -> None:
    """Where the keys of the positions from `low` on lie for key/value head 0: elements from the pool's start.

    Rows up to the next 32 repeat the last one, so that nothing beyond the sequence is read.
    """
    num_layers, num_kv_heads, block_size, width = shape[1], shape[3], shape[4], shape[5]
    i = 0
    while i < filled:
        block, slot = (low + i) // block_size, (low + i) % block_size
        begin = (table[block] * num_layers + layer) * 2 * num_kv_heads * block_size
        count = min(block_size - slot, filled - i)
        for j in range(count):
            rows[i + j] = (begin + slot + j) * width
        i += count
    for j in range(filled, (filled + _WHOLE - 1) // _WHOLE * _WHOLE):
        rows[j] = rows[filled - 1]


@compiled_exactly
def begin_ahead(
    ahead: Any, seq: Any, first_key: Any, batch: Any, group: Any, most_rows: Any, window: Any, shape: Any,
    layer: Any, itemsize: Any, rows: Any,
) -> None:  # fmt: skip
    """Puts `ahead` as far before the first key of sequence `seq` as fetching shall be before the work."""
    ahead[0], ahead[1] = seq, first_key
    most = max(LANES, _AHEAD_BYTES // (2 * shape[3] * shape[5] * itemsize))
    find_ahead(ahead, min(KEY_TILE, most), batch, group, most_rows, window, shape, layer, rows)


@compiled_exactly
def find_ahead(
    ahead: Any,
    wanted: Any,
    batch: Any,
    group: Any,
    most_rows: Any,
    window: Any,
    shape: Any,
    layer: Any,
    rows: Any,
) -> Any:
    """Moves `ahead`, a sequence and a position of it, on by `wanted` keys of the batch's short queries: those of up to
    `most_rows` rows a head.

    Their places go to `rows`; returns how many there are.
    """
    query_starts, ends, block_tables, table_starts = batch
    found = 0
    while found < wanted and ahead[0] < ends.shape[0]:
        seq = ahead[0]
        count, end = query_starts[seq + 1] - query_starts[seq], ends[seq]
        low = max(ahead[1], end - count - window + 1) if window > 0 else ahead[1]
        if low >= end or count * group > most_rows:
            ahead[0], ahead[1] = seq + 1, 0
            continue
        some = min(wanted - found, end - low)
        table = block_tables[table_starts[seq] : table_starts[seq + 1]]
        find_rows(table, shape, layer, low, some, rows[found:])
        found += some
        ahead[1] = low + some
    return found
