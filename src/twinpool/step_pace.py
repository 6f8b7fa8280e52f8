"""How long model steps take: what a worker has measured, and what others predict from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinpool.bounds import Seconds

LEAST_CHUNK_TOKENS = 16
"""A prompt whose chunks would be smaller is not computed beside streams: each costs a whole step."""


def prompt_limit_s(itl_budget_s: float) -> float:
    """How long a step with prompt tokens may take where streams run, or may join: half the budget.

    A stream that joins while such a step runs waits for its end and then for the step that it takes part in.
    """
    return itl_budget_s / 2


@dataclass(frozen=True, slots=True)
class StepPace:
    """A step of n sequences that decode and m prompt tokens takes `base_s` + n · `sequence_s` + m · `prompt_token_s`.

    `base_s` is the weights' part, `sequence_s` one token and the KV of its context, `prompt_token_s` the arithmetic.
    """

    base_s: Seconds
    sequence_s: Seconds
    prompt_token_s: Seconds

    def decode_step_s(self, num_sequences: int) -> float:
        """One token for each of so many sequences."""
        return self.base_s + num_sequences * self.sequence_s

    def prompt_tokens_within(self, limit_s: float, num_sequences: int) -> int:
        """The prompt tokens that a step of so many sequences can have to end within `limit_s`; 0 if that were fewer
        than `LEAST_CHUNK_TOKENS`."""
        left_s = limit_s - self.decode_step_s(num_sequences)
        fitting = math.floor(min(left_s / max(self.prompt_token_s, 1e-9), 1e9))
        return fitting if fitting >= LEAST_CHUNK_TOKENS else 0

    def prompt_s(self, num_tokens: int, num_sequences: int, chunk_tokens: int) -> float:
        """How long so many prompt tokens take in chunks of `chunk_tokens` (1 or more) beside so many sequences."""
        num_steps = math.ceil(num_tokens / chunk_tokens)
        return num_steps * self.decode_step_s(num_sequences) + num_tokens * self.prompt_token_s
