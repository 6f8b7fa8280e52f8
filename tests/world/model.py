"""A model whose next token is a hash of all tokens before it, read back from the bytes of a paged KV pool.

It really reads every position through the block table, so a wrong table, a lost or corrupt push, or a block with two
owners gives wrong tokens. Sampling noise is a function of (seed, position), as the engine's is. What it tells of a
token is a function of that token and all before it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from twinpool.engine.batch import SequenceSlice, StepBatch, StepOutput
from twinpool.engine.look_back import LookBack
from twinpool.kv_transfer.connector import KVRegion
from twinpool.layout import Dtype, KVLayout
from twinpool.request import Grammar, GrammarKind, Job, RequestKey, SamplingParams, TokenLogprobs
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


def told(kv: bytes, token: int, num_top: int) -> TokenLogprobs:
    """What it tells of `token` after those whose KV is `kv`, and of the likeliest there."""
    found = xxh3_64_intdigest(kv, seed=token)
    top = tuple(((found + place) % VOCABULARY, -1.0 - place) for place in range(num_top))
    return TokenLogprobs(-(found % 1024) / 128, top)


def told_of(token_ids: Sequence[int], first: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    """What it tells of the tokens of a sequence from place `first`, 1 or more, on."""
    kv = array("i", token_ids).tobytes()
    return tuple(told(kv[: SLOT_BYTES * i], token_ids[i], num_top) for i in range(first, len(token_ids)))


def ending_at(output_index: int) -> Grammar:
    """A grammar that no token fits any more at that place of an answer."""
    return Grammar(GrammarKind.REGEX, str(output_index))


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
        self._look_backs: dict[RequestKey, LookBack | None] = {}
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
        """One step: writes the slices' tokens, reads back all before them, samples, and tells what is asked for."""
        keys = [chunk.key for chunk in batch.slices]
        if len(set(keys)) != len(keys):
            raise Broken("one slice per sequence", f"{keys}")
        for chunk in batch.slices:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self._put(chunk.block_table, position, token)
        output = StepOutput({}, seconds)
        for chunk in batch.slices:
            self._check_look_back(chunk)
            if chunk.scoring:
                kv = self._kv(chunk.block_table, chunk.end)
                output.scores[chunk.key] = tuple(
                    told(kv[: SLOT_BYTES * end], token, chunk.scoring.num_top)
                    for end, token in enumerate(chunk.scoring.followers, chunk.start + 1)
                )
            if chunk.sampling:
                self._sample(chunk, chunk.sampling, output)
        return output

    def _sample(self, chunk: SequenceSlice, sampling: SamplingParams, output: StepOutput) -> None:
        kv = self._kv(chunk.block_table, chunk.end)
        token = output.token_ids[chunk.key] = next_token(kv, sampling, chunk.banned_token_ids)
        if sampling.logprobs is not None:
            output.logprobs[chunk.key] = told(kv, token, sampling.logprobs)
        if sampling.grammar is not None and chunk.look_back is not None:
            index = chunk.end - chunk.look_back.job.num_prompt
            if index >= int(sampling.grammar.source):
                output.failed[chunk.key] = f"no token fits at {index}"

    def _check_look_back(self, chunk: SequenceSlice) -> None:
        known = self._look_backs.setdefault(chunk.key, chunk.look_back)
        is_needed = chunk.sampling is not None and chunk.sampling.looks_back
        if chunk.look_back is not known or (is_needed and known is None):
            raise Broken("one past per sequence", f"{chunk.key} looks back at {chunk.look_back}, was {known}")

    def _put(self, table: Sequence[int], position: int, token: int) -> None:
        block, slot = table[position // self._size], position % self._size
        if self.pinned[block]:
            raise Broken("a push pins its blocks", f"block {block} is written while a transport reads it")
        self._slots[2 * self._size * block + slot] = token

    def _kv(self, table: Sequence[int], num_tokens: int) -> bytes:
        num_blocks, half = -(-num_tokens // self._size), SLOT_BYTES * self._size
        starts = [block * self._block_bytes for block in table[:num_blocks]]
        return b"".join([self._memory[start : start + half] for start in starts])[: SLOT_BYTES * num_tokens]
