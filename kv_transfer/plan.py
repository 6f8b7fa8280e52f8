"""Which bytes go where: pure arithmetic on block ids and layouts.

Equal layouts copy whole blocks, or a run of layers of whole blocks. Unequal ones (block size, tensor-parallel
degree) copy byte ranges; `copies` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinpool.errors import LayoutMismatch
from twinpool.layout import KVLayout


def layer_group(layout: KVLayout, min_bytes: int, max_groups: int) -> int:
    """How many layers to move together: as few as make one block's share at least `min_bytes` (or a whole block), in
    at most `max_groups` groups of about the same size.
    """
    num_groups = min(max(layout.block_bytes // min_bytes, 1), max_groups, layout.num_layers)
    return -(-layout.num_layers // num_groups)


def compatible(mine: KVLayout, theirs: KVLayout) -> None:
    """Checks that the transports can move blocks between two workers, as they run today: equal layouts only.

    Raises:
        LayoutMismatch: they differ; the message lists each differing field with both values.
    """
    _require_equal(mine, theirs, ("version", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype"))


def _require_equal(mine: KVLayout, theirs: KVLayout, fields: Sequence[str]) -> None:
    differing = [
        f"{name} is {getattr(mine, name)} on one side and {getattr(theirs, name)} on the other"
        for name in fields
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if differing:
        raise LayoutMismatch(
            f"KV blocks of different layouts cannot be exchanged: {'; '.join(differing)}. "
            "Start both workers with the same model, --dtype, --kv-cache-dtype and --block-size"
        )


# ── unequal layouts ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor-parallel rank's part of a model's KV.

    `layout.num_kv_heads` counts the heads that this rank holds. With more ranks than heads, each head is
    held by `degree / total_kv_heads` consecutive ranks.
    """

    layout: KVLayout
    rank: int
    degree: int
    total_kv_heads: int

    def __post_init__(self) -> None:
        held = max(self.total_kv_heads // self.degree, 1)
        divides = self.total_kv_heads % self.degree == 0 or self.degree % self.total_kv_heads == 0
        if not divides or not 0 <= self.rank < self.degree or self.layout.num_kv_heads != held:
            raise LayoutMismatch(
                f"rank {self.rank} of {self.degree} cannot hold {self.layout.num_kv_heads} of "
                f"{self.total_kv_heads} KV heads; the degree must divide the heads, or the heads the degree"
            )

    @property
    def heads(self) -> range:
        """The model's KV heads that this rank holds, in the order in which they lie in a block."""
        first = self.rank * self.total_kv_heads // self.degree
        return range(first, first + self.layout.num_kv_heads)

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same heads as this one."""
        return max(self.degree // self.total_kv_heads, 1)


class ByteRange(NamedTuple):
    """`length` bytes at `source_offset` in `source_block` go to `target_offset` in `target_block`."""

    source_block: int
    source_offset: int
    target_block: int
    target_offset: int
    length: int


def heads_to_send(source: Shard, target: Shard) -> range:
    """The model's KV heads that rank `source` sends to rank `target`; maybe none.

    Where several source ranks hold a head, the target ranks are spread over them, so every target gets each
    of its heads from exactly one source.
    """
    first = max(source.heads.start, target.heads.start)
    last = min(source.heads.stop, target.heads.stop)
    if source.rank % source.num_replicas != target.rank % source.num_replicas:
        return range(0)
    return range(first, max(first, last))


def copies(
    source: Shard,
    target: Shard,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    num_tokens: int,
) -> list[ByteRange]:
    """The byte ranges that move `num_tokens` tokens of one sequence from `source`'s blocks to `target`'s.

    Both block lists are the sequence's block tables from its first token on. Ranges that touch on both
    sides are merged; the result is ordered by source position within each token run.

    Raises:
        LayoutMismatch: the shards are not parts of one model's KV, or a table is too short for the tokens.
    """
    ours, other = source.layout, target.layout
    _require_equal(ours, other, ("version", "num_layers", "head_dim", "dtype"))
    if source.total_kv_heads != target.total_kv_heads:
        raise LayoutMismatch(
            f"{source.total_kv_heads} KV heads at the source, {target.total_kv_heads} at the target"
        )
    for side, layout, table in (("source", ours, source_blocks), ("target", other, target_blocks)):
        if len(table) < (needed := layout.num_blocks(num_tokens)):
            raise LayoutMismatch(f"{num_tokens} tokens need {needed} {side} blocks, not {len(table)}")
    heads = heads_to_send(source, target)
    found: list[ByteRange] = []
    for token, length in _token_runs(ours.block_size, other.block_size, num_tokens):
        from_block, from_slot = divmod(token, ours.block_size)
        to_block, to_slot = divmod(token, other.block_size)
        found.extend(
            ByteRange(
                source_blocks[from_block],
                _head_offset(source, plane, head) + from_offset + from_slot * slot_bytes,
                target_blocks[to_block],
                _head_offset(target, plane, head) + to_offset + to_slot * slot_bytes,
                length * slot_bytes,
            )
            for plane in range(2 * ours.num_layers)
            for head in heads
            for (from_offset, slot_bytes), (to_offset, _) in zip(_parts(ours), _parts(other), strict=True)
        )
    return _merged(found)


def _token_runs(source_size: int, target_size: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """(first token, count) of each run that stays within one block on both sides."""
    token = 0
    while token < num_tokens:
        ends = (token - token % size + size for size in (source_size, target_size))
        end = min(*ends, num_tokens)
        yield token, end - token
        token = end


def _head_offset(shard: Shard, plane: int, head: int) -> int:
    """Byte offset in a block of one head; `plane` counts (layer, k|v) pairs."""
    layout = shard.layout
    return (plane * layout.num_kv_heads + head - shard.heads.start) * layout.head_bytes


def _parts(layout: KVLayout) -> tuple[tuple[int, int], ...]:
    """(byte offset within a head, bytes per slot) of the vectors, and of their scales where there are any."""
    vectors = (0, layout.head_dim * layout.dtype.num_bytes)
    scales = (layout.block_size * vectors[1], layout.dtype.scale_bytes)
    return (vectors, scales) if scales[1] else (vectors,)


def _merged(ranges: list[ByteRange]) -> list[ByteRange]:
    merged: list[ByteRange] = []
    for r in ranges:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.source_block, last.target_block) == (r.source_block, r.target_block)
            and last.source_offset + last.length == r.source_offset
            and last.target_offset + last.length == r.target_offset
        ):
            merged[-1] = last._replace(length=last.length + r.length)
        else:
            merged.append(r)
    return merged
