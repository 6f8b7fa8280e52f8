"""A model whose next token is a hash of all tokens before it, read back through a paged KV pool.

It really reads every position through the block table, so a wrong table, a lost push or a block with two
owners gives wrong tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.errors import InvariantViolation
from twinpool.request import Job, RequestKey

VOCABULARY = 61
EOS = 0
EMPTY = -1

Cells = tuple[int, ...]


def next_token(token_ids: Sequence[int], banned: Sequence[int] = ()) -> int:
    """The token after `token_ids`, never one of `banned`."""
    token = digest(token_ids) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def answer(job: Job) -> list[int]:
    """All output tokens of the job, with no pool and no batch: what every way of serving must give."""
    token_ids, output = list(job.token_ids), []
    while True:
        index = len(output)
        output.append(next_token(token_ids, job.banned_token_ids(index)))
        token_ids.append(output[-1])
        if job.finish_reason(index, output[-1]):
            return output


def digest(token_ids: Sequence[int]) -> int:
    """64 bits that stand for these tokens; of a block's cells: what a manifest says of it."""
    return xxh3_64_intdigest(",".join(map(str, token_ids)).encode())


class FakeKV:
    """A KV pool that keeps, in each slot of each block, the token whose KV is there.

    Writing to a block that is `pinned`, because a transport has yet to read it, is an error.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: list[Cells] = [(EMPTY,) * block_size] * num_blocks
        self.pinned: Counter[int] = Counter()

    def read(self, block_id: int) -> Cells:
        """The block's contents."""
        return self._blocks[block_id]

    def write(self, block_id: int, cells: Cells) -> None:
        """Replaces the block's contents."""
        self._blocks[block_id] = cells

    def run(self, batch: StepBatch, seconds: float) -> StepOutput:
        """One step: writes the slices' tokens, reads back all before them, samples."""
        keys = [chunk.key for chunk in batch.slices]
        if len(set(keys)) != len(keys):
            raise InvariantViolation(f"a sequence is twice in one step: {keys}")
        output: dict[RequestKey, int] = {}
        for chunk in batch.slices:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self._put(chunk.block_table, position, token)
        for chunk in batch.slices:
            if chunk.sampling:
                tokens = [self._get(chunk.block_table, position) for position in range(chunk.end)]
                output[chunk.key] = next_token(tokens, chunk.banned_token_ids)
        return StepOutput(output, seconds)

    def _put(self, table: Sequence[int], position: int, token: int) -> None:
        block, slot = table[position // self._block_size], position % self._block_size
        assert self.pinned[block] == 0, f"block {block} is written while a transport reads it"
        cells = self._blocks[block]
        self._blocks[block] = (*cells[:slot], token, *cells[slot + 1 :])

    def _get(self, table: Sequence[int], position: int) -> int:
        return self._blocks[table[position // self._block_size]][position % self._block_size]
