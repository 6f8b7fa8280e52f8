"""Steps of some sizes, timed at the start of a hybrid: its first predictions are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from twinpool.engine.batch import SequenceSlice, StepBatch
from twinpool.request import RequestKey, SamplingParams
from twinpool.worker.core import StepTimed
from twinpool.worker.step_thread import Runner

CONTEXT_TOKENS = 256
"""Of each sequence that decodes."""
SIZES = ((1, 0), (8, 0), (24, 0), (0, 64), (0, 256))
"""Sequences, and prompt tokens, of each step."""
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class StepSize(NamedTuple):
    """`num_sequences` that decode with `context_tokens` each, or as many tokens of a prompt."""

    num_sequences: int
    num_prompt_tokens: int
    context_tokens: int


def sizes_that_fit(
    num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int
) -> Iterator[StepSize]:
    """Those of `SIZES` that a worker with such a pool and such limits can run."""
    longest = min(CONTEXT_TOKENS, max_model_len, num_blocks * block_size)
    for num_sequences, num_prompt_tokens in SIZES:
        if num_prompt_tokens <= longest and num_sequences <= max_num_seqs:
            yield StepSize(num_sequences, num_prompt_tokens, longest)


def timed_steps(
    runner: Runner, num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int
) -> Iterator[StepTimed]:
    """Runs each of `SIZES` that fits twice, and gives the second's time: the first meets cold caches.

    Writes to blocks from the first on: call it before the pool of `num_blocks` is used.
    """
    for size in sizes_that_fit(num_blocks, block_size, max_model_len, max_num_seqs):
        batch = _batch(*size, num_blocks, block_size)
        runner.run(batch)
        yield StepTimed(size.num_sequences, size.num_prompt_tokens, runner.run(batch).seconds)


def _batch(
    num_sequences: int, num_prompt_tokens: int, context: int, num_blocks: int, block_size: int
) -> StepBatch:
    per_sequence = -(-context // block_size)
    tables = [
        [(i * per_sequence + j) % num_blocks for j in range(per_sequence)]
        for i in range(max(1, num_sequences))
    ]
    pieces = [([0], context - 1)] * num_sequences or [([0] * num_prompt_tokens, 0)]
    return StepBatch(
        tuple(
            SequenceSlice(RequestKey(f"timed-{i}", 0), token_ids, start, tables[i], GREEDY)
            for i, (token_ids, start) in enumerate(pieces)
        )
    )
