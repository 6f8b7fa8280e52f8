"""Copy plans against a numpy model of the layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from twinpool.errors import LayoutMismatch
from twinpool.kv_transfer.plan import Shard, compatible, copies, heads_to_send, layer_group
from twinpool.layout import Dtype, KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype=Dtype.FLOAT32)


def shard(heads: int, degree: int, rank: int, block_size: int) -> Shard:
    layout = replace(LAYOUT, num_kv_heads=max(heads // degree, 1), block_size=block_size)
    return Shard(layout, rank, degree, heads)


def full_kv(heads: int, num_tokens: int) -> NDArray[Any]:
    """[layer, k|v, head, token, dim]: every element differs."""
    shape = (LAYOUT.num_layers, 2, heads, num_tokens, LAYOUT.head_dim)
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


def pool_of(part: Shard, kv: NDArray[Any], table: list[int], num_blocks: int) -> NDArray[Any]:
    """The rank's pool with the sequence in the blocks of `table`, zeros elsewhere."""
    layout = part.layout
    pool = np.zeros(
        (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim),
        np.float32,
    )
    for token in range(kv.shape[3]):
        block, slot = divmod(token, layout.block_size)
        pool[table[block], :, :, :, slot] = kv[:, :, part.heads, token]
    return pool


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("source_size", "target_size"), [(8, 8), (8, 16), (16, 8), (8, 12)])
def test_every_target_rank_gets_its_heads_and_tokens_from_all_source_ranks(
    heads: int, source_size: int, target_size: int
) -> None:
    num_tokens, num_blocks = 29, 6
    kv = full_kv(heads, num_tokens)
    rng = np.random.default_rng(0)
    for source_degree, target_degree in product([1, 2, 4, 8], repeat=2):
        sources = [shard(heads, source_degree, rank, source_size) for rank in range(source_degree)]
        source_table = rng.permutation(num_blocks).tolist()
        pools = [pool_of(part, kv, source_table, num_blocks).view(np.uint8) for part in sources]
        for rank in range(target_degree):
            target = shard(heads, target_degree, rank, target_size)
            table = rng.permutation(num_blocks).tolist()
            wanted = pool_of(target, kv, table, num_blocks)
            found = np.zeros_like(wanted).view(np.uint8).reshape(num_blocks, -1)
            written = np.zeros(found.shape, dtype=np.int64)
            for source, pool in zip(sources, pools, strict=True):
                flat = pool.reshape(num_blocks, -1)
                for r in copies(source, target, source_table, table, num_tokens):
                    to = slice(r.target_offset, r.target_offset + r.length)
                    found[r.target_block, to] = flat[
                        r.source_block, r.source_offset : r.source_offset + r.length
                    ]
                    written[r.target_block, to] += 1
            assert (found == wanted.view(np.uint8).reshape(num_blocks, -1)).all()
            assert written.max() == 1
            assert written.sum() == np.count_nonzero(wanted) * 4


def int8_pool_of(part: Shard, kv: NDArray[Any], table: list[int], num_blocks: int) -> NDArray[Any]:
    """A rank's int8 pool as bytes: of each head all vectors, then their scales. `kv` has both for each token."""
    layout = part.layout
    planes = 2 * layout.num_layers
    pool = np.zeros((num_blocks, planes, layout.num_kv_heads, layout.head_bytes), np.uint8)
    scales = pool[..., layout.block_size * layout.head_dim :]
    for token in range(kv.shape[2]):
        block, slot = divmod(token, layout.block_size)
        at = slice(slot * layout.head_dim, (slot + 1) * layout.head_dim)
        pool[table[block], :, :, at] = kv[:, part.heads, token, : layout.head_dim]
        at = slice(slot * 4, (slot + 1) * 4)
        scales[table[block], :, :, at] = kv[:, part.heads, token, layout.head_dim :]
    return pool.reshape(num_blocks, -1)


@pytest.mark.parametrize(("source_size", "target_size"), [(8, 8), (8, 16), (16, 8)])
def test_the_scales_of_int8_move_with_their_vectors(source_size: int, target_size: int) -> None:
    int8 = replace(LAYOUT, dtype=Dtype.INT8)
    kv = np.random.default_rng(0).integers(1, 256, (6, 2, 29, 4 + 4)).astype(np.uint8)
    source = Shard(replace(int8, block_size=source_size), 0, 1, 2)
    flat = int8_pool_of(source, kv, [3, 0, 4, 1], 6)
    for rank in range(2):
        target = Shard(replace(int8, num_kv_heads=1, block_size=target_size), rank, 2, 2)
        wanted = int8_pool_of(target, kv, [5, 2, 1, 0], 6)
        found = np.zeros_like(wanted)
        for r in copies(source, target, [3, 0, 4, 1], [5, 2, 1, 0], 29):
            moved = flat[r.source_block, r.source_offset : r.source_offset + r.length]
            found[r.target_block, r.target_offset : r.target_offset + r.length] = moved
        assert (found == wanted).all()
    whole = copies(source, source, [5], [0], source_size)
    assert [r.length for r in whole] == [source.layout.block_bytes]


def test_replicated_heads_are_read_from_different_source_ranks() -> None:
    targets = [shard(1, 4, rank, 8) for rank in range(4)]
    sources = [shard(1, 4, rank, 8) for rank in range(4)]
    sent = [[len(heads_to_send(source, target)) for target in targets] for source in sources]
    assert sent == np.eye(4, dtype=int).tolist()


def test_equal_shards_merge_a_full_block_into_one_range() -> None:
    part = shard(2, 1, 0, 8)
    ranges = copies(part, part, [5, 2], [0, 1], 16)
    assert [(r.source_block, r.target_block, r.length) for r in ranges] == [
        (5, 0, part.layout.block_bytes),
        (2, 1, part.layout.block_bytes),
    ]


def test_shards_of_different_models_are_refused() -> None:
    mine = shard(2, 1, 0, 8)
    with pytest.raises(LayoutMismatch, match="head_dim is 4 on one side and 8"):
        copies(mine, replace(mine, layout=replace(mine.layout, head_dim=8)), [0], [0], 8)
    with pytest.raises(LayoutMismatch, match="2 KV heads at the source, 4"):
        copies(mine, shard(4, 2, 0, 8), [0], [0], 8)
    with pytest.raises(LayoutMismatch, match="9 tokens need 2 target blocks, not 1"):
        copies(mine, mine, [0, 1], [0], 9)


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="must divide"):
        shard(3, 2, 0, 8)


def test_layers_are_grouped_until_a_part_is_worth_a_message() -> None:
    smollm = KVLayout(30, 3, 64, 16, Dtype.BFLOAT16)
    assert layer_group(smollm, min_bytes=128 << 10, max_groups=256) == 15
    assert layer_group(LAYOUT, min_bytes=128 << 10, max_groups=256) == LAYOUT.num_layers
    assert layer_group(replace(LAYOUT, num_layers=600), min_bytes=1, max_groups=256) == 3


def test_equal_layouts_are_compatible() -> None:
    compatible(LAYOUT, replace(LAYOUT))


@pytest.mark.parametrize(
    ("field", "theirs"),
    [("block_size", 16), ("num_kv_heads", 1), ("dtype", Dtype.BFLOAT16), ("num_layers", 4), ("version", 2)],
)
def test_the_handshake_names_both_sides_values(field: str, theirs: object) -> None:
    mine = getattr(LAYOUT, field)
    with pytest.raises(LayoutMismatch, match=f"{field} is {mine} on one side and {theirs} on the other"):
        compatible(LAYOUT, replace(LAYOUT, **{field: theirs}))  # type: ignore[arg-type]
