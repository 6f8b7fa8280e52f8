"""A model whose next token is a hash of all tokens before it, read back from the bytes of a paged KV pool.

It really reads every position through the block table, so a wrong table, a lost or corrupt push, or a block with two
owners gives wrong tokens. Sampling noise is a function of (seed, position), as the engine's is.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.kv_transfer.connector import KVRegion
from twinpool.layout import Dtype, KVLayout
from twinpool.request import Job, RequestKey, SamplingParams
from world.story import Broken

VOCABULARY = 61
EOS = 0
SLOT_BYTES = 4


def layout(block_size: int) -> KVLayout:
    """The layout of this model's KV: one number for K, one for V, per token."""
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype=Dtype.FLOAT32)


def text(token_id: int) -> str:
    """The text of a token: one letter."""
    return chr(ord("A") + token_id)


def next_token(kv: bytes, sampling: SamplingParams, banned: Sequence[int] = ()) -> int:
    """The token after those whose KV is `kv`, never one of `banned`."""
    noise = b"" if sampling.temperature == 0 else f"{sampling.seed}@{len(kv)}".encode()
    token = xxh3_64_intdigest(kv + noise) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def answer(job: Job) -> list[int]:
    """All output tokens of a job at its first attempt, with no pool and no batch: what every way of serving gives."""
    token_ids, output = array("i", job.token_ids), list[int]()
    while True:
        index = len(output)
        output.append(next_token(token_ids.tobytes(), job.sampling, job.banned_token_ids(index)))
        token_ids.append(output[-1])
        if job.finish_reason(index, output[-1]):
            return output


class FakeKV:
    """A KV pool in bytes: the K half of each slot is the token whose KV is there.

    Writing to a block that is `pinned`, because a transport has yet to read it, breaks a promise.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._block_bytes = layout(block_size).block_bytes
        self._memory = bytearray(num_blocks * self._block_bytes)
        self._slots = memoryview(self._memory).cast("i")
        self.region = KVRegion(memoryview(self._memory), layout(block_size), num_blocks)
        self.pinned: Counter[int] = Counter()

    def read(self, block_id: int) -> bytes:
        """The block's bytes."""
        start = block_id * self._block_bytes
        return bytes(self._memory[start : start + self._block_bytes])

    def write(self, block_id: int, content: bytes) -> None:
        """Replaces the block's bytes."""
        start = block_id * self._block_bytes
        self._memory[start : start + self._block_bytes] = content

    def run(self, batch: StepBatch, seconds: float) -> StepOutput:
        """One step: writes the slices' tokens, reads back all before them, samples."""
        keys = [chunk.key for chunk in batch.slices]
        if len(set(keys)) != len(keys):
            raise Broken("one slice per sequence", f"{keys}")
        for chunk in batch.slices:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self._put(chunk.block_table, position, token)
        output: dict[RequestKey, int] = {}
        for chunk in batch.slices:
            if chunk.sampling:
                kv = self._kv(chunk.block_table, chunk.end)
                output[chunk.key] = next_token(kv, chunk.sampling, chunk.banned_token_ids)
        return StepOutput(output, seconds)

    def _put(self, table: Sequence[int], position: int, token: int) -> None:
        block, slot = table[position // self._size], position % self._size
        if self.pinned[block]:
            raise Broken("a push pins its blocks", f"block {block} is written while a transport reads it")
        self._slots[2 * self._size * block + slot] = token

    def _kv(self, table: Sequence[int], num_tokens: int) -> bytes:
        num_blocks, half = -(-num_tokens // self._size), SLOT_BYTES * self._size
        starts = [block * self._block_bytes for block in table[:num_blocks]]
        return b"".join([self._memory[start : start + half] for start in starts])[: SLOT_BYTES * num_tokens]
