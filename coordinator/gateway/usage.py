"""How many tokens a request took, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.coordinator.service import RequestFacts


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all prompts (each once, however many answers it gets) and of all answers.

    `firsts` are the facts of each prompt's first answer, which computed the prompt; `all_facts` those of every answer.
    Both are empty if those of any answer are not known (any more).
    """

    num_prompt: int
    num_output: int
    firsts: Sequence[RequestFacts] = ()
    all_facts: Sequence[RequestFacts] = ()

    @property
    def num_cached(self) -> int | None:
        """Of the prompts' tokens those that were found in a prefix cache; None if that is not known."""
        return sum(facts.num_cached_tokens for facts in self.firsts) if self.firsts else None

    def as_json(self, *, with_facts: bool = False) -> dict[str, Any]:
        """The `usage` object as OpenAI has it; `with_facts` adds our own block."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
        }
        if (cached := self.num_cached) is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if with_facts and (facts := self.facts_as_json()) is not None:
            usage["twinpool"] = facts
        return usage

    def facts_as_json(self) -> dict[str, float] | None:
        """Our own block of the usage, None if nothing is known of the answers. Times are the longest of any, as they
        all ran at once; tokens transferred and resumes add up."""
        every = self.all_facts
        if not every:
            return None
        together = RequestFacts(
            num_cached_tokens=sum(facts.num_cached_tokens for facts in self.firsts),
            num_computed_tokens=sum(facts.num_computed_tokens for facts in self.firsts),
            num_transferred_tokens=sum(facts.num_transferred_tokens for facts in every),
            num_resumed=sum(facts.num_resumed for facts in every),
            queue_s=max(facts.queue_s for facts in every),
            prefill_s=max(facts.prefill_s for facts in every),
            transfer_s=max(facts.transfer_s for facts in every),
            decode_s=max(facts.decode_s for facts in every),
        )
        return together.as_json()
