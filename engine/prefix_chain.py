"""Names for the blocks of a sequence: equal ones hold equal tokens from the sequence's beginning on. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from struct import pack

from xxhash import xxh3_128_digest

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
