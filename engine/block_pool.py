"""The blocks of one KV pool: who owns each, which prefixes they hold, which come free next. No torch.

A block is in exactly one place::

    free ──reserve──► owned ──release──► cached   (findable, read by nobody: evicted for room)
      ▲                 │  └──release──► free     (nothing findable in it)
      └─────────── quarantined                    (revoked; a writer may still be writing)

Blocks whose tokens are all computed are *sealed*: other sequences with the same leading tokens find them by
their hash chain and share them, read-only. A shared block is owned once, by all its readers together, and
counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

from twinpool.engine.prefix_chain import PrefixChain
from twinpool.engine.release_order import ReleaseOrder
from twinpool.errors import InvariantViolation


class BlockTable:
    """The blocks of one sequence, in order of its tokens. Whoever holds the table owns them.

    The first `num_cached` came from the prefix cache. The first ones are *sealed*: they are findable under `digests`,
    or (None) duplicate a findable one, as some do if it `has_duplicates`.
    """

    __slots__ = ("_block_ids", "_grown", "digests", "has_duplicates", "num_cached")

    def __init__(self, block_ids: tuple[int, ...], digests: Sequence[bytes] = ()) -> None:
        self._block_ids = block_ids
        self._grown: list[int] = []
        self.digests: list[bytes | None] = list(digests)
        self.has_duplicates = False
        self.num_cached = len(digests)

    def __len__(self) -> int:
        return len(self._block_ids) + len(self._grown)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Replaced, never changed, when the table grows: a plan may keep the tuple."""
        if self._grown:
            self._block_ids += tuple(self._grown)
            self._grown.clear()
        return self._block_ids

    @property
    def num_sealed(self) -> int:
        """How many of its blocks are."""
        return len(self.digests)

    def grow(self, block_id: int) -> None:
        """One block more. They are put together when somebody looks: a table often grows before."""
        self._grown.append(block_id)

    def hand_over(self) -> BlockTable:
        """Another table that has everything of this one, which is empty afterwards."""
        heir = BlockTable(self.block_ids)
        heir.digests, heir.has_duplicates, heir.num_cached = (
            self.digests,
            self.has_duplicates,
            self.num_cached,
        )
        self.clear()
        return heir

    def clear(self) -> None:
        """It is empty."""
        self._block_ids = ()
        self._grown = []
        self.digests = []


class BlockPool:
    """All blocks of one worker.

    Every table that it gives must come back once, by `release` or `quarantine`; a second time raises.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._free = _ids(num_blocks)[::-1]
        self._readers = [0] * num_blocks
        self._num_further_readers = 0
        """Of all blocks, the readers beyond the first."""
        self._num_owned = 0
        self._index: dict[bytes, int] = {}
        self._cached = ReleaseOrder[bytes]()  # by digest; the first is the least recently used
        self._quarantined: set[int] = set()
        self._tables: set[BlockTable] = set()

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks in at least one table."""
        return self._num_owned

    @property
    def num_cached(self) -> int:
        """Findable blocks in no table; a reservation may evict them."""
        return len(self._cached)

    @property
    def cached_block_ids(self) -> tuple[int, ...]:
        """The blocks that `num_cached` counts, the least recently used first."""
        return tuple(self._index[digest] for digest in self._cached)

    @property
    def num_quarantined(self) -> int:
        """Blocks of revoked reservations that may still be written."""
        return len(self._quarantined)

    @property
    def num_available(self) -> int:
        """Blocks that a reservation could have: free and cached."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def count_cached(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are findable now."""
        index = self._index
        for count, digest in enumerate(digests):
            if digest not in index:
                return count
        return len(digests)

    def try_reserve(self, num_blocks: int, prefix: Sequence[bytes] = ()) -> BlockTable | None:
        """A table of `num_blocks` (one or more), all or nothing; None if there is no room.

        The leading blocks that are findable under `prefix` are shared instead of taken.
        """
        if num_blocks < 1:
            raise InvariantViolation(
                f"a table of {num_blocks} blocks was asked for; a sequence has at least one"
            )
        num_shared = self.count_cached(prefix[:num_blocks])
        digests = prefix[:num_shared]
        shared = [self._index[digest] for digest in digests]
        readers = self._readers
        if num_blocks - num_shared > self.num_available - sum(1 for block in shared if not readers[block]):
            return None
        for block, digest in zip(shared, digests, strict=True):
            if readers[block]:
                self._num_further_readers += 1
            else:
                self._cached.remove(digest)
                self._num_owned += 1
            readers[block] += 1
        table = BlockTable((*shared, *self._take(num_blocks - num_shared)), digests)
        self._tables.add(table)
        return table

    def try_grow(self, table: BlockTable, num_blocks: int = 1) -> bool:
        """Adds `num_blocks` to the table, all or nothing; False if there is no room."""
        self._require_live(table)
        if num_blocks > self.num_available:
            return False
        for block in self._take(num_blocks):
            table.grow(block)
        return True

    def grow_each(self, tables: Sequence[BlockTable]) -> int:
        """Adds a block to each of the tables in order, as far as there is room; returns how many have grown."""
        self._require_live(*tables)
        num_grown = min(len(tables), self.num_available)
        for table, block in zip(tables, self._take(num_grown), strict=False):
            table.grow(block)
        return num_grown

    def seal(self, table: BlockTable, chain: PrefixChain, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is in the table: its full blocks become findable under
        `chain`.

        A block whose prefix is findable already stays the table's own.
        """
        first, last = table.num_sealed, num_tokens // self.block_size
        if first >= last or not self._prefix_cache:
            return
        self._require_live(table)
        index, blocks, digests = self._index, table.block_ids[first:last], list(chain.digests[first:last])
        if index.keys().isdisjoint(digests):
            index.update(zip(digests, blocks, strict=True))
            table.digests += digests
            return
        for block, digest in zip(blocks, digests, strict=True):
            is_findable = index.setdefault(digest, block) == block
            table.digests.append(digest if is_findable else None)
            table.has_duplicates |= not is_findable

    def hand_over(self, table: BlockTable) -> BlockTable:
        """Moves the blocks to a new table, for a new owner. The giver's is empty and worth nothing
        afterwards."""
        self._require_live(table)
        heir = table.hand_over()
        self._tables.remove(table)
        self._tables.add(heir)
        return heir

    def release(self, table: BlockTable) -> None:
        """Gives the table's blocks back: to the cache where findable and read by nobody else, or to the free
        ones.

        Raises:
            InvariantViolation: the table was released, quarantined or handed over before.
        """
        self._require_live(table)
        self._give_back(table.block_ids, table.digests, has_duplicates=table.has_duplicates)
        self._forget(table)

    def quarantine(self, table: BlockTable, first: int, last: int) -> tuple[int, ...]:
        """Releases the table, but for blocks [first, last), which a writer may still write: they are out of
        use until `end_quarantine`. Returns them.

        Raises:
            InvariantViolation: as `release`; or such a block is findable or shared, so others read it.
        """
        self._require_live(table)
        block_ids, digests = table.block_ids, table.digests
        held = block_ids[first:last]
        for number, block in enumerate(held, first):
            is_findable = number < len(digests) and digests[number] is not None
            if self._readers[block] != 1 or is_findable:
                raise InvariantViolation(
                    f"block {block} was open to a remote writer while others could read it"
                )
        self._give_back(
            block_ids[:first] + block_ids[last:],
            digests[:first] + digests[last:],
            has_duplicates=table.has_duplicates,
        )
        self._forget(table)
        for block in held:
            self._readers[block] = 0
        self._num_owned -= len(held)
        self._quarantined.update(held)
        return held

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """Nobody writes to these blocks any more: they are free.

        Raises:
            InvariantViolation: one of them is not in quarantine.
        """
        for block in block_ids:
            if block not in self._quarantined:
                raise InvariantViolation(f"block {block} left a quarantine that it was not in")
            self._quarantined.remove(block)
            self._free.append(block)

    def inherit(self, past: BlockPool) -> None:
        """Takes over what `past` can find. It had the same memory, for an owner that has gone: it is worth nothing
        afterwards, and this pool has not been used yet.

        Raises:
            InvariantViolation: a block of `past` is owned or in quarantine, this pool is in use, or the sizes differ.
        """
        if past.num_owned or past.num_quarantined:
            raise InvariantViolation(
                f"a pool with {past.num_owned} blocks owned and {past.num_quarantined} in quarantine was inherited"
            )
        sizes = (past.num_blocks, past.block_size), (self.num_blocks, self.block_size)
        if self.num_free != self.num_blocks or sizes[0] != sizes[1]:
            raise InvariantViolation(
                f"{self.num_free} blocks are free in a pool of {sizes[1]} that inherits {sizes[0]}"
            )
        self._free, self._cached, self._index = past._free, past._cached, past._index

    def check_count(self) -> None:
        """The part of `check` that costs nothing, for after every step.

        Raises:
            InvariantViolation: free, owned, cached and quarantined blocks do not add up to all.
        """
        num_idle = len(self._free) + len(self._cached) + len(self._quarantined)
        if num_idle + self._num_owned != self.num_blocks:
            counts = (self.num_free, self.num_owned, self.num_cached, self.num_quarantined)
            raise InvariantViolation(
                f"of {self.num_blocks} blocks, {counts} are counted as free, owned, cached and quarantined"
            )

    def check(self) -> None:
        """Counts everything again.

        Raises:
            InvariantViolation: a block is in no place or in two, a reader is not accounted for, the index is
            wrong.
        """
        readers = Counter(block for table in self._tables for block in table.block_ids)
        if not self._index.keys() >= set(self._cached):
            raise InvariantViolation("a block is cached that nobody can find")
        owned, cached = set(readers), set(self.cached_block_ids)
        places = (set(self._free), owned, cached, self._quarantined)
        if sum(map(len, places)) != self.num_blocks or len(set().union(*places)) != self.num_blocks:
            raise InvariantViolation(
                f"of {self.num_blocks} blocks, free/owned/cached/quarantined are {places}"
            )
        if (len(self._free), len(self._cached)) != (len(places[0]), len(cached)) or self._num_owned != len(
            owned
        ):
            raise InvariantViolation(f"{self._num_owned} blocks counted as owned, {len(owned)} are in tables")
        for block, count in enumerate(self._readers):
            if count != readers[block]:
                raise InvariantViolation(
                    f"block {block} counts {count} readers, {readers[block]} tables have it"
                )
        if self._num_further_readers != (num := sum(readers.values()) - len(readers)):
            raise InvariantViolation(f"{self._num_further_readers} readers share blocks, tables say {num}")
        findable = {
            digest: block
            for table in self._tables
            for digest, block in zip(table.digests, table.block_ids, strict=False)
            if digest is not None
        }
        findable |= {digest: self._index[digest] for digest in self._cached}
        if findable != self._index:
            raise InvariantViolation(f"the index is {self._index}, in tables and cached are {findable}")

    def _take(self, num_blocks: int) -> list[int]:
        free, readers = self._free, self._readers
        first = max(0, len(free) - num_blocks)
        taken = free[first:]
        taken.reverse()
        del free[first:]
        if len(taken) < num_blocks:
            taken += map(self._index.pop, self._cached.take_first(num_blocks - len(taken)))
        for block in taken:
            readers[block] = 1
        self._num_owned += num_blocks
        return taken

    def _give_back(
        self, block_ids: Sequence[int], digests: Sequence[bytes | None], *, has_duplicates: bool
    ) -> None:
        """Of a table's blocks, the first of which are sealed under `digests`."""
        readers = self._readers
        unfindable: Sequence[int]
        if has_duplicates or self._num_further_readers:
            unfindable, findable = [], []
            for block, digest in zip_longest(block_ids, digests):
                readers[block] -= 1
                if readers[block]:
                    self._num_further_readers -= 1
                elif digest is None:
                    unfindable.append(block)
                else:
                    findable.append(digest)
        else:
            for block in block_ids:
                readers[block] = 0
            unfindable, findable = block_ids[len(digests) :], cast("list[bytes]", digests)
        self._num_owned -= len(unfindable) + len(findable)
        # Last block first: a prefix is worth more than what follows it, so it is evicted later.
        self._free += reversed(unfindable)
        self._cached.extend(reversed(findable))

    def _require_live(self, *tables: BlockTable) -> None:
        if not self._tables.issuperset(tables):
            raise InvariantViolation(
                "a table was used after its blocks were released, quarantined or handed over"
            )

    def _forget(self, table: BlockTable) -> None:
        self._tables.remove(table)
        table.clear()


_known_ids: list[int] = []


def _ids(num_blocks: int) -> list[int]:
    """The ids of so many blocks: the same objects for all pools of a process, of which a simulation has hundreds."""
    _known_ids.extend(range(len(_known_ids), num_blocks))
    return _known_ids[:num_blocks]
