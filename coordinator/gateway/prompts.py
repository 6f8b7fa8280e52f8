"""Prompts as token ids: long ones are tokenized in a thread, and none that could not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.coordinator.gateway.conversations import Conversation
from twinpool.coordinator.gateway.requests import GenerationRequest, WrittenPrompt, check_token_ids
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ContextLengthExceeded, InvalidRequest

INLINE_CHARS = 4096
"""Texts up to here are tokenized on the event loop, in about a millisecond; longer ones in a thread."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `text` is what its client wrote, if its tokens are those of all of it; else None."""

    token_ids: tuple[int, ...]
    text: str | None = None


class PromptReader:
    """Tokenizes with one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest_token = tokenizer.longest_token

    async def read(self, wanted: GenerationRequest, context: int) -> tuple[Prompt, ...]:
        """The prompts of a request, each of at least one token; in a context of `context` tokens.

        Raises:
            ContextLengthExceeded: one is longer than the context, or its text than any that the context could hold.
            InvalidRequest: one is empty or has ids that are none, or the chat template refuses the messages.
        """
        for prompt in wanted.prompts:
            _refuse_crowd(prompt, context)
        if sum(map(_num_chars, wanted.prompts)) <= INLINE_CHARS:
            return self._read(wanted, context)
        return await asyncio.to_thread(self._read, wanted, context)

    async def encode(
        self, written: str | Conversation, context: int, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """The token ids of what is not to be answered, however many; in a context of `context` tokens.

        Raises:
            ContextLengthExceeded: it is longer than any text that the context could hold.
            InvalidRequest: the chat template refuses the messages.
        """
        _refuse_crowd(written, context)
        if _num_chars(written) <= INLINE_CHARS:
            return self._encoded(written, context, add_special_tokens).token_ids
        prompt = await asyncio.to_thread(self._encoded, written, context, add_special_tokens)
        return prompt.token_ids

    def _read(self, wanted: GenerationRequest, context: int) -> tuple[Prompt, ...]:
        return tuple(self._read_one(prompt, wanted, context) for prompt in wanted.prompts)

    def _read_one(self, written: WrittenPrompt, wanted: GenerationRequest, context: int) -> Prompt:
        if isinstance(written, tuple):
            prompt = Prompt(written)
        else:
            prompt = self._encoded(written, context, wanted.add_special_tokens)
        if not prompt.token_ids:
            raise InvalidRequest("prompt is empty; send at least one token", param=wanted.prompt_field)
        kept = wanted.kept_tokens(context)
        if kept is not None and len(prompt.token_ids) > kept:
            prompt = Prompt(prompt.token_ids[-kept:])
        if len(prompt.token_ids) > context:
            found = (
                f"the prompt has {len(prompt.token_ids)} tokens, and this model's maximum context length is {context} "
                "tokens; shorten it"
            )
            raise ContextLengthExceeded(found, param=wanted.prompt_field)
        if isinstance(written, tuple):
            check_token_ids("prompt", prompt.token_ids, self._tokenizer.vocab_size)
        return prompt

    def _encoded(self, written: str | Conversation, context: int, add_special_tokens: bool) -> Prompt:
        text = written.render(self._tokenizer) if isinstance(written, Conversation) else written
        # Tokenizing takes about a second per million characters: not for a text that cannot fit.
        if len(text) > context * self._longest_token:
            message = (
                f"the prompt has {len(text)} characters, and this model's maximum context length is {context} tokens, "
                "which hold less; shorten it"
            )
            raise ContextLengthExceeded(message, param=_field(written))
        return Prompt(tuple(self._tokenizer.encode(text, add_special_tokens)), text)


def total_tokens(prompts: Sequence[Prompt]) -> int:
    """Tokens of all prompts together."""
    return sum(len(prompt.token_ids) for prompt in prompts)


def _refuse_crowd(written: WrittenPrompt, context: int) -> None:
    # A template is rendered in Python, about 100,000 messages in a second: not those that cannot fit.
    if isinstance(written, Conversation) and len(written.messages) > context:
        found = (
            f"there are {len(written.messages)} messages, and this model's maximum context length is {context} tokens, "
            "which hold fewer; leave some out"
        )
        raise ContextLengthExceeded(found, param=_field(written))


def _num_chars(prompt: WrittenPrompt) -> int:
    match prompt:
        case str():
            return len(prompt)
        case Conversation():
            return prompt.num_chars
        case _:
            return 0


def _field(written: WrittenPrompt) -> str:
    return "messages" if isinstance(written, Conversation) else "prompt"
