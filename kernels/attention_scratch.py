"""Where `attention_amx.py` keeps a tile of its work: the parts of a rank's scratch, and how long they are.

The scratch is flat, of float32 elements; all places are indices of these. `lay_out` says where the parts of one tile
of work begin, `scratch_size` how much room the largest one takes: a part that is added to one is added to the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from twinpool.kernels.attention_places import KEY_TILE
from twinpool.kernels.attention_tiles import TILE, TILE_DIMS
from twinpool.kernels.lanes import LANES, compiled_exactly

ROWS = 384
"""Query rows that share a packed tile of keys."""
MOST_HEADS = 16
"""Heads that a tile of work has, at most."""
AT_ONCE = 4
"""Columns of a prompt that go through each step one after the other. Taking turns more often costs: a vector waits for
the scores just written by tiles, and while tiles multiply, the processor has half its vector multipliers."""
_COLUMN_WIDTH = 512
"""Elements of the heads of one column: their keys and values then stay in the second-level cache."""


class Work(NamedTuple):
    """A tile of work: `rows` query rows of each of `heads` key/value heads. Where parts of the scratch begin."""

    group: int
    rows: int
    heads: int
    together: int
    """Heads of a column, if a head has less than one."""
    columns: int
    """Of a head, or of the heads that share one."""
    depth: int
    """Tiles of a key or a query."""
    tiles: int
    """Tiles of a value."""
    sums: int
    queries: int
    places: int
    peaks: int
    masses: int
    shrinks: int
    scores: int
    weights: int
    keys: int
    values: int
    buffer: int


def scratch_size(group: int, head_dim: int) -> int:
    """Elements of scratch that each rank needs, for `group` query heads to a key/value head."""
    columns = -(-max(ROWS, group) // LANES) + MOST_HEADS
    units = head_dim // 2
    together = max(1, _COLUMN_WIDTH // head_dim)
    in_columns = columns * LANES * (head_dim + units + 3) + LANES * (4 + units)
    return in_columns + KEY_TILE * (AT_ONCE * (LANES + LANES // 2) + 2 * together * units)


@compiled_exactly
def lay_out(base: Any, group: Any, rows: Any, heads: Any, width: Any) -> Any:
    """The `Work` of `rows` query rows of each of `heads` heads of `width` elements, in the scratch from `base` on."""
    together = min(heads, LANES // rows, max(1, _COLUMN_WIDTH // width)) if rows <= LANES else 1
    columns = (rows + LANES - 1) // LANES
    depth, tiles = width // (2 * TILE_DIMS), width // TILE_DIMS
    all_columns = heads * columns
    queries = base + all_columns * tiles * TILE
    places = queries + all_columns * depth * TILE
    peaks = places + all_columns * LANES
    masses = peaks + all_columns * LANES
    shrinks = masses + all_columns * LANES
    scores = shrinks + LANES
    weights = scores + AT_ONCE * KEY_TILE * LANES
    keys = weights + AT_ONCE * KEY_TILE * (LANES // 2)
    values = keys + together * KEY_TILE * width // 2
    buffer = values + together * KEY_TILE * width // 2
    return Work(
        group, rows, heads, together, columns, depth, tiles, base, queries, places, peaks, masses, shrinks, scores,
        weights, keys, values, buffer,
    )  # fmt: skip


@compiled_exactly
def scores_of(work: Any, number: Any) -> Any:
    """Where column `number`, one of `AT_ONCE` at hand, has its scores."""
    return work.scores + number % AT_ONCE * KEY_TILE * LANES


@compiled_exactly
def weights_of(work: Any, number: Any) -> Any:
    """Where column `number`, one of `AT_ONCE` at hand, has its weights."""
    return work.weights + number % AT_ONCE * KEY_TILE * (LANES // 2)
