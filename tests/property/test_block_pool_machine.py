"""Any order of operations on a block pool keeps its books, and what is found is what was computed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from twinpool.engine.block_pool import BlockPool, BlockTable
from twinpool.engine.prefix_chain import PrefixChain

SIZE = 2
NUM_BLOCKS = 9


class Held:
    """A sequence's tokens, of which `num_done` are computed, and its table."""

    def __init__(self, token_ids: list[int], table: BlockTable, chain: PrefixChain) -> None:
        self.token_ids = token_ids
        self.table = table
        self.chain = chain
        self.num_done = table.num_cached * SIZE


class PoolMachine(RuleBasedStateMachine):
    """Mirrors, in `contents`, the tokens up to the end of each block that a model would have computed into it."""

    held = Bundle("held")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.contents: dict[int, tuple[int, ...]] = {}

    @rule(
        target=held, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12), extra=st.integers(0, 2)
    )
    def reserve(self, token_ids: list[int], extra: int) -> object:
        chain = PrefixChain(SIZE)
        chain.extend(token_ids)
        num_blocks = self.pool.blocks_for(len(token_ids)) + extra
        available = self.pool.num_available
        table = self.pool.try_reserve(num_blocks, chain.digests)
        if table is None:
            assert num_blocks > available == self.pool.num_available
            return None
        for index, block in enumerate(table.block_ids[: table.num_cached]):
            assert self.contents[block] == tuple(token_ids[: (index + 1) * SIZE])
        for block in table.block_ids[table.num_cached :]:
            self.contents[block] = ()
        return Held(token_ids, table, chain)

    @rule(item=held, num_tokens=st.integers(1, 5))
    def compute(self, item: Held | None, num_tokens: int) -> None:
        if item is None or not item.table.block_ids:
            return
        item.num_done = min(len(item.token_ids), item.num_done + num_tokens)
        for index in range(item.table.num_cached, item.num_done // SIZE):
            self.contents[item.table.block_ids[index]] = tuple(item.token_ids[: (index + 1) * SIZE])
        self.pool.seal(item.table, item.chain, item.num_done)

    @rule(item=held)
    def grow(self, item: Held | None) -> None:
        if item and item.table.block_ids and self.pool.try_grow(item.table):
            self.contents[item.table.block_ids[-1]] = ()

    @rule(target=held, item=consumes(held))
    def hand_over(self, item: Held | None) -> object:
        if item:
            item.table = self.pool.hand_over(item.table)
        return item

    @rule(item=consumes(held))
    def release(self, item: Held | None) -> None:
        if item:
            self.pool.release(item.table)

    @rule(target=quarantined, item=consumes(held))
    def quarantine(self, item: Held | None) -> object:
        if item is None:
            return ()
        if item.table.num_sealed > item.table.num_cached:
            self.pool.release(item.table)
            return ()
        return self.pool.quarantine(item.table, item.table.num_cached, len(item.table))

    @rule(blocks=consumes(quarantined))
    def end_quarantine(self, blocks: tuple[int, ...]) -> None:
        self.pool.end_quarantine(blocks)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        pool = self.pool
        assert pool.num_free + pool.num_owned + pool.num_cached + pool.num_quarantined == NUM_BLOCKS


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrderOfOperations = PoolMachine.TestCase
