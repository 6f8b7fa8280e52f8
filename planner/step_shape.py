"""What one model step computes, as far as its duration depends on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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


StepTime = Callable[[StepShape], float]
"""Seconds that a step takes."""


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


def of_request(input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> StepShape:
    """The sums over all steps of a request, of whose prompt `cached_tokens` are there: its first output token comes of
    the prompt, and each other one is a sequence that reads all before it."""
    decoded = max(output_tokens - 1, 0)
    seen = decoded * input_tokens + decoded * (decoded + 1) // 2
    prompt = of_chunk(input_tokens - cached_tokens, cached_tokens)
    return prompt._replace(num_sequences=decoded, context_tokens=seen)


def chunks_of(num_new: int, num_cached: int, token_budget: int) -> Iterator[StepShape]:
    """The steps of a prompt alone, of which `num_cached` tokens are there, in chunks of `token_budget`."""
    for start in range(0, num_new, token_budget):
        yield of_chunk(min(token_budget, num_new - start), num_cached + start)


def together(*shapes: StepShape) -> StepShape:
    """One step of all that these steps have."""
    return StepShape(*map(sum, zip(*shapes, strict=True)))
