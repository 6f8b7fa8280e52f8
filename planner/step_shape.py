"""What one model step computes, as far as its duration depends on it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class StepShape(NamedTuple):
    """Sums over the slices of a step. A slice of one token whose prompt is computed is a *sequence*, else a *chunk*.

    `context_tokens`: KV positions that all sequences read, their new tokens' among them. `prompt_tokens`: new tokens of
    all chunks. `prompt_pairs`: (query, key) pairs of the chunks' attention, n · cached + n · (n + 1) / 2 for n new
    tokens after `cached`. `prompt_context`: KV positions that the chunks read, new ones among them.
    """

    num_sequences: int = 0
    context_tokens: int = 0
    num_chunks: int = 0
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    prompt_context: int = 0

    def after(self, num_steps: int) -> StepShape:
        """The same sequences so many steps later, each with as many tokens more."""
        num_sequences, context_tokens, *chunks = self
        return StepShape(num_sequences, context_tokens + num_steps * num_sequences, *chunks)


def of_sequences(lengths: Collection[int]) -> StepShape:
    """A step of sequences that have so many tokens each, of which the last is computed now."""
    return StepShape(num_sequences=len(lengths), context_tokens=sum(lengths))


def of_chunk(num_new: int, num_cached: int = 0) -> StepShape:
    """A step of one chunk of `num_new` prompt tokens after `num_cached` whose KV is there."""
    return StepShape(
        num_chunks=1,
        prompt_tokens=num_new,
        prompt_pairs=num_new * num_cached + num_new * (num_new + 1) // 2,
        prompt_context=num_cached + num_new,
    )


def together(*shapes: StepShape) -> StepShape:
    """One step of all that these steps have."""
    return StepShape(*map(sum, zip(*shapes, strict=True)))
