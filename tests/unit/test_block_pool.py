"""The block pool: who owns what, what is found again, what goes first when room is short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.prefix_chain import PrefixChain
from twinpool.errors import InvariantViolation

SIZE = 4


def chain_of(token_ids: list[int], salt: str = "") -> PrefixChain:
    chain = PrefixChain(SIZE, salt)
    chain.extend(token_ids)
    return chain


def reserve(pool: BlockPool, num_blocks: int, chain: PrefixChain | None = None) -> BlockTable:
    table = pool.try_reserve(num_blocks, chain.digests if chain else ())
    assert table is not None
    pool.check()
    return table


def fill_and_release(pool: BlockPool, token_ids: list[int]) -> None:
    chain = chain_of(token_ids)
    table = reserve(pool, pool.blocks_for(len(token_ids)), chain)
    pool.seal(table, chain, len(token_ids))
    pool.release(table)
    pool.check()


def test_a_reservation_gets_all_its_blocks_or_none() -> None:
    pool = BlockPool(5, SIZE)
    table = reserve(pool, 3)
    assert pool.try_reserve(3) is None
    assert (pool.num_free, pool.num_owned) == (2, 3)
    pool.release(table)
    assert pool.num_free == 5


def test_growing_gets_all_blocks_or_none() -> None:
    pool = BlockPool(3, SIZE)
    table = reserve(pool, 1)
    assert not pool.try_grow(table, 3)
    assert pool.try_grow(table, 2)
    assert len(set(table.block_ids)) == 3
    pool.release(table)
    pool.check()


def test_releasing_twice_is_refused() -> None:
    pool = BlockPool(2, SIZE)
    table = reserve(pool, 1)
    pool.release(table)
    with pytest.raises(InvariantViolation, match="after its blocks were released"):
        pool.release(table)
    pool.check()


def test_handing_over_empties_the_giver() -> None:
    pool = BlockPool(4, SIZE)
    giver = reserve(pool, 2)
    blocks = giver.block_ids
    heir = pool.hand_over(giver)
    assert heir.block_ids == blocks
    assert giver.block_ids == ()
    for use in (pool.release, pool.hand_over, lambda table: pool.try_grow(table)):
        with pytest.raises(InvariantViolation):
            use(giver)
    pool.release(heir)
    assert pool.num_free == 4


def test_a_table_of_another_pool_is_refused() -> None:
    table = reserve(BlockPool(2, SIZE), 1)
    with pytest.raises(InvariantViolation):
        BlockPool(2, SIZE).release(table)


def test_full_blocks_are_found_again_and_partial_ones_are_not() -> None:
    pool = BlockPool(8, SIZE)
    fill_and_release(pool, list(range(10)))
    assert (pool.num_cached, pool.num_free) == (2, 6)
    again = chain_of(list(range(12)))
    table = reserve(pool, 3, again)
    assert table.num_cached == 2
    pool.release(table)


def test_a_shared_prefix_is_owned_once_and_freed_after_its_last_reader() -> None:
    pool = BlockPool(8, SIZE)
    fill_and_release(pool, list(range(8)))
    chain = chain_of(list(range(8)))
    first, second = reserve(pool, 3, chain), reserve(pool, 3, chain)
    assert first.block_ids[:2] == second.block_ids[:2]
    assert pool.num_owned == 4
    pool.release(first)
    assert (pool.num_owned, pool.num_cached) == (3, 0)
    pool.release(second)
    assert (pool.num_owned, pool.num_cached) == (0, 2)


def test_blocks_become_findable_only_once_their_tokens_are_computed() -> None:
    pool = BlockPool(8, SIZE)
    chain = chain_of(list(range(8)))
    table = reserve(pool, 2, chain)
    assert pool.count_cached(chain.digests) == 0
    pool.seal(table, chain, 7)
    assert pool.count_cached(chain.digests) == 1
    pool.release(table)


def test_two_sequences_that_computed_the_same_tokens_leave_one_findable_copy() -> None:
    pool = BlockPool(8, SIZE)
    chain = chain_of(list(range(8)))
    first, second = reserve(pool, 2, chain), reserve(pool, 2, chain)
    pool.seal(first, chain, 8)
    pool.seal(second, chain, 8)
    pool.release(second)
    pool.release(first)
    assert (pool.num_cached, pool.num_free) == (2, 6)
    pool.check()


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4, SIZE)
    old, new = list(range(8)), list(range(100, 108))
    fill_and_release(pool, old)
    fill_and_release(pool, new)
    fill_and_release(pool, old)
    table = reserve(pool, 1)
    assert pool.count_cached(chain_of(new).digests) == 1
    assert pool.count_cached(chain_of(old).digests) == 2
    pool.release(table)


def test_a_reservation_never_evicts_the_prefix_that_it_shares() -> None:
    pool = BlockPool(3, SIZE)
    fill_and_release(pool, list(range(8)))
    chain = chain_of(list(range(8)))
    assert pool.try_reserve(4, chain.digests) is None
    table = reserve(pool, 3, chain)
    assert table.num_cached == 2
    pool.release(table)


def test_a_salt_keeps_prefixes_apart() -> None:
    assert chain_of([1, 2, 3, 4]).digests != chain_of([1, 2, 3, 4], salt="tenant").digests


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(4, SIZE, prefix_cache=False)
    fill_and_release(pool, list(range(8)))
    assert pool.num_free == 4


def test_a_chain_extended_in_pieces_equals_one_hashed_at_once() -> None:
    tokens = list(range(23))
    grown = PrefixChain(SIZE)
    for length in (1, 3, 4, 9, 16, 23):
        grown.extend(tokens[:length])
    assert grown.digests == chain_of(tokens).digests
    assert len(grown.digests) == 5


def test_revoked_blocks_stay_out_of_use_until_their_quarantine_ends() -> None:
    pool = BlockPool(5, SIZE)
    fill_and_release(pool, list(range(4)))
    table = reserve(pool, 4, chain_of(list(range(4))))
    held = pool.quarantine(table, 1, 3)
    pool.check()
    assert (pool.num_quarantined, pool.num_owned, pool.num_cached, pool.num_free) == (2, 0, 1, 2)
    assert pool.try_reserve(4) is None
    pool.end_quarantine(held)
    assert pool.num_available == 5
    with pytest.raises(InvariantViolation, match="quarantine that it was not in"):
        pool.end_quarantine(held)


def test_a_block_that_others_read_cannot_have_been_open_to_a_writer() -> None:
    pool = BlockPool(4, SIZE)
    fill_and_release(pool, list(range(4)))
    table = reserve(pool, 2, chain_of(list(range(4))))
    with pytest.raises(InvariantViolation, match="open to a remote writer"):
        pool.quarantine(table, 0, 2)
    pool.release(table)
    pool.check()


def test_the_check_finds_a_block_that_was_lost() -> None:
    pool = BlockPool(4, SIZE)
    table = reserve(pool, 2)
    table._block_ids = table.block_ids[:1]
    with pytest.raises(InvariantViolation):
        pool.check()


def test_the_count_after_a_step_finds_a_block_that_is_in_two_places() -> None:
    pool = BlockPool(4, SIZE)
    table = reserve(pool, 2)
    pool.check_count()
    pool._free.append(table.block_ids[0])
    with pytest.raises(InvariantViolation, match=r"of 4 blocks, \(3, 2, 0, 0\) are counted"):
        pool.check_count()


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from twinpool.engine.prefix_chain import PrefixChain\n"
        "chain = PrefixChain(4, 'salt'); chain.extend(range(9)); print([d.hex() for d in chain.digests])"
    )
    source = str(Path(__file__).resolve().parents[2] / "src")
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    chain = PrefixChain(4, "salt")
    chain.extend(range(9))
    assert printed == {f"{[digest.hex() for digest in chain.digests]}\n"}


def test_a_pool_inherits_what_its_predecessor_could_find_in_the_order_of_its_use() -> None:
    past, pool = BlockPool(4, SIZE), BlockPool(4, SIZE)
    old, new = list(range(8)), list(range(50, 58))
    fill_and_release(past, old)
    fill_and_release(past, new)
    kept = past.cached_block_ids
    pool.inherit(past)
    pool.check()
    assert (pool.num_free, pool.cached_block_ids) == (0, kept)
    assert pool.count_cached(chain_of(old).digests) == pool.count_cached(chain_of(new).digests) == 2
    table = reserve(pool, 2, chain_of(new))
    assert table.num_cached == 2
    reserve(pool, 1)
    assert pool.count_cached(chain_of(old).digests) == 1


def test_only_a_pool_that_nobody_reads_or_writes_is_inherited_and_by_a_fresh_one_of_its_size() -> None:
    used = BlockPool(4, SIZE)
    table = reserve(used, 1)
    for past, pool in (
        (used, BlockPool(4, SIZE)),
        (BlockPool(4, SIZE), used),
        (BlockPool(4, SIZE), BlockPool(5, SIZE)),
        (BlockPool(4, SIZE), BlockPool(4, 2 * SIZE)),
    ):
        with pytest.raises(InvariantViolation):
            pool.inherit(past)
    used.quarantine(table, 0, 1)
    with pytest.raises(InvariantViolation, match="1 in quarantine"):
        BlockPool(4, SIZE).inherit(used)
