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

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from struct import pack

from xxhash import xxh3_128_digest

from twinpool.engine.release_order import ReleaseOrder
from twinpool.errors import InvariantViolation
from twinpool.request import Job


class PrefixChain:
    """The hashes of one sequence's full blocks; `digests[i]` names all tokens up to the end of block i.

    Each is the 128-bit xxh3 of its parent's digest and its own tokens (little-endian 32 bits each); the root
    is the hash of the salt. So equal digests mean equal prefixes under an equal salt, in every process. A
    simulator knows which prefixes are equal and not their tokens: its chains override `extend`.
    """

    __slots__ = ("_block_size", "_root", "digests")

    grows_alone = False
    """Whether no other request can have the blocks that this one fills beyond its prompt."""

    def __init__(self, block_size: int, salt: str = "") -> None:
        self._block_size = block_size
        self._root = xxh3_128_digest(salt.encode())
        self.digests: list[bytes] = []

    @classmethod
    def of(cls, job: Job, block_size: int) -> PrefixChain:
        """The chain of the job's tokens."""
        chain = cls(block_size, job.cache_salt)
        chain.extend(job.token_ids)
        return chain

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hashes the full blocks that the sequence has grown by. `token_ids` are all its tokens so far."""
        size, digests = self._block_size, self.digests
        first = len(digests) * size
        last = len(token_ids) // size * size
        if first >= last:
            return
        data = pack(f"<{last - first}I", *token_ids[first:last])
        parent = digests[-1] if digests else self._root
        for start in range(0, len(data), 4 * size):
            parent = xxh3_128_digest(parent + data[start : start + 4 * size])
            digests.append(parent)

    def num_shared(self, other: PrefixChain) -> int:
        """How many full blocks both begin with."""
        ours, theirs = self.digests, other.digests
        # Before equal digests all are equal.
        return bisect_left(range(min(len(ours), len(theirs))), True, key=lambda i: ours[i] != theirs[i])


Chains = Callable[[Job], PrefixChain]
"""Makes the chain of a job's tokens, which is the caller's to extend."""


def chains_of(block_size: int) -> Chains:
    """Chains of the tokens themselves, for blocks of that size."""
    return partial(PrefixChain.of, block_size=block_size)


class BlockTable:
    """The blocks of one sequence, in order of its tokens. Whoever holds the table owns them.

    `block_ids` is replaced, never changed, when the table grows: a plan may keep the tuple. The first
    `num_cached` came from the prefix cache; the first `num_sealed` are findable or duplicate a findable one.
    """

    __slots__ = ("block_ids", "num_cached", "num_sealed")

    def __init__(self, block_ids: tuple[int, ...], num_cached: int) -> None:
        self.block_ids = block_ids
        self.num_cached = num_cached
        self.num_sealed = num_cached

    def __len__(self) -> int:
        return len(self.block_ids)


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
        self._num_owned = 0
        self._digest: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._cached = ReleaseOrder(num_blocks)  # the first is the least recently used
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
        return tuple(self._cached)

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
        shared = [self._index[digest] for digest in prefix[:num_shared]]
        readers, cached = self._readers, self._cached
        if num_blocks - num_shared > self.num_available - sum(1 for block in shared if not readers[block]):
            return None
        for block in shared:
            if not readers[block]:
                cached.remove(block)
                self._num_owned += 1
            readers[block] += 1
        table = BlockTable((*shared, *self._take(num_blocks - num_shared)), num_shared)
        self._tables.add(table)
        return table

    def try_grow(self, table: BlockTable, num_blocks: int = 1) -> bool:
        """Adds `num_blocks` to the table, all or nothing; False if there is no room."""
        self._require_live(table)
        if num_blocks > self.num_available:
            return False
        table.block_ids = (*table.block_ids, *self._take(num_blocks))
        return True

    def grow_each(self, tables: Sequence[BlockTable]) -> int:
        """Adds a block to each of the tables in order, as far as there is room; returns how many have grown."""
        self._require_live(*tables)
        num_grown = min(len(tables), self.num_available)
        for table, block in zip(tables, self._take(num_grown), strict=False):
            table.block_ids += (block,)
        return num_grown

    def seal(self, table: BlockTable, chain: PrefixChain, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is in the table: its full blocks become findable under
        `chain`.

        A block whose prefix is findable already stays the table's own.
        """
        first, last = table.num_sealed, num_tokens // self.block_size
        if first >= last:
            return
        self._require_live(table)
        table.num_sealed = last
        if not self._prefix_cache:
            return
        index, digests = self._index, self._digest
        blocks, names = table.block_ids[first:last], list(chain.digests[first:last])
        if index.keys().isdisjoint(names):
            index.update(zip(names, blocks, strict=True))
            for block, digest in zip(blocks, names, strict=True):
                digests[block] = digest
            return
        for block, digest in zip(blocks, names, strict=True):
            if digest not in index:
                index[digest] = block
                digests[block] = digest

    def hand_over(self, table: BlockTable) -> BlockTable:
        """Moves the blocks to a new table, for a new owner. The giver's is empty and worth nothing
        afterwards."""
        self._require_live(table)
        heir = BlockTable(table.block_ids, table.num_cached)
        heir.num_sealed = table.num_sealed
        self._forget(table)
        self._tables.add(heir)
        return heir

    def release(self, table: BlockTable) -> None:
        """Gives the table's blocks back: to the cache where findable and read by nobody else, or to the free
        ones.

        Raises:
            InvariantViolation: the table was released, quarantined or handed over before.
        """
        self._require_live(table)
        self._give_back(table.block_ids)
        self._forget(table)

    def quarantine(self, table: BlockTable, first: int, last: int) -> tuple[int, ...]:
        """Releases the table, but for blocks [first, last), which a writer may still write: they are out of
        use until `end_quarantine`. Returns them.

        Raises:
            InvariantViolation: as `release`; or such a block is findable or shared, so others read it.
        """
        self._require_live(table)
        held = table.block_ids[first:last]
        for block in held:
            if self._readers[block] != 1 or self._digest[block] is not None:
                raise InvariantViolation(
                    f"block {block} was open to a remote writer while others could read it"
                )
        self._give_back(table.block_ids[:first] + table.block_ids[last:])
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
        self._free, self._cached = past._free, past._cached
        self._digest, self._index = past._digest, past._index

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
        owned = set(readers)
        places = (set(self._free), owned, set(self._cached), self._quarantined)
        if sum(map(len, places)) != self.num_blocks or len(set().union(*places)) != self.num_blocks:
            raise InvariantViolation(
                f"of {self.num_blocks} blocks, free/owned/cached/quarantined are {places}"
            )
        if len(self._free) != len(places[0]) or self._num_owned != len(owned):
            raise InvariantViolation(f"{self._num_owned} blocks counted as owned, {len(owned)} are in tables")
        for block, count in enumerate(self._readers):
            if count != readers[block]:
                raise InvariantViolation(
                    f"block {block} counts {count} readers, {readers[block]} tables have it"
                )
        for digest, block in self._index.items():
            if self._digest[block] != digest or not (block in owned or block in self._cached):
                raise InvariantViolation(f"the index finds block {block}, which does not hold that prefix")
        if sum(digest is not None for digest in self._digest) != len(self._index):
            raise InvariantViolation("a block believes to be findable, but the index does not have it")
        if any(self._digest[block] is None for block in self._cached):
            raise InvariantViolation("a block is cached that nobody can find")

    def _take(self, num_blocks: int) -> list[int]:
        free, cached, readers = self._free, self._cached, self._readers
        first = max(0, len(free) - num_blocks)
        taken = free[first:]
        taken.reverse()
        del free[first:]
        if len(taken) < num_blocks:
            evicted = cached.take_first(num_blocks - len(taken))
            self._unfind(evicted)
            taken += evicted
        for block in taken:
            readers[block] = 1
        self._num_owned += num_blocks
        return taken

    def _give_back(self, block_ids: Sequence[int]) -> None:
        # Last block first: a prefix is worth more than what follows it, so it is evicted later.
        readers, digests = self._readers, self._digest
        idle: list[int] = []
        for block in reversed(block_ids):
            readers[block] = left = readers[block] - 1
            if not left:
                idle.append(block)
        cached = [block for block in idle if digests[block] is not None]
        if len(cached) < len(idle):
            self._free += [block for block in idle if digests[block] is None]
        self._cached.extend(cached)
        self._num_owned -= len(idle)

    def _unfind(self, block_ids: Sequence[int]) -> None:
        index, digests = self._index, self._digest
        for block in block_ids:
            digest = digests[block]
            if digest is None:
                raise InvariantViolation(f"block {block} was cached without a digest")
            del index[digest]
            digests[block] = None

    def _require_live(self, *tables: BlockTable) -> None:
        if not self._tables.issuperset(tables):
            raise InvariantViolation(
                "a table was used after its blocks were released, quarantined or handed over"
            )

    def _forget(self, table: BlockTable) -> None:
        self._tables.remove(table)
        table.block_ids = ()


_known_ids: list[int] = []


def _ids(num_blocks: int) -> list[int]:
    """The ids of so many blocks: the same objects for all pools of a process, of which a simulation has hundreds."""
    _known_ids.extend(range(len(_known_ids), num_blocks))
    return _known_ids[:num_blocks]
