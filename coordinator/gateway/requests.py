"""A checked request, and its sampling parameters once the prompt's length is known.

Defaults are OpenAI's: temperature 1, nothing cut off. A model's generation_config does not change them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

from twinpool.coordinator.gateway.answer import AnswerRules
from twinpool.coordinator.gateway.conversations import Conversation
from twinpool.coordinator.gateway.deltas import DeltaParser, MakeParser, PlainText
from twinpool.coordinator.gateway.structured import Constraint, refuse_too_long
from twinpool.coordinator.gateway.tools import ToolPlan
from twinpool.errors import ContextLengthExceeded, InvalidRequest
from twinpool.request import Grammar, SamplingParams

COMPLETION_MAX_TOKENS = 16
"""Output tokens of `/v1/completions` when the request does not say, as OpenAI and vLLM have it."""
SEED_BITS = 63
LARGEST_TOP_K = 2**31 - 1
"""More tokens than any vocabulary has: a larger `top_k` means the same, and would not fit a message."""

WrittenPrompt = str | tuple[int, ...] | Conversation
"""A prompt as its client wrote it: text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked request that is not tokenized yet: `n` answers to each of `prompts`.

    `max_tokens` None means `default_max_tokens`, or as many as the context leaves, and at most that. With
    `is_prompt_only` nothing is to be generated: the client wants to know what the model thinks of its prompt. Of a
    prompt that is longer than `truncate_to` the last tokens count (-1: as many as the context leaves).

    `num_logprobs` of the likeliest tokens are told with each output token's log probability, `num_prompt_logprobs` with
    each prompt token's, and with `echo` the answer has the prompt too. `timeout_s` is how long after it came in the
    answer must be complete; it may be infinite.

    `bad_word_token_ids` are `bad_words` as sequences of tokens, once those are known (`bad_words.py`).

    `grammar`, what the answer must match by its `constraint`, and `make_parser`, which reads a text that has parts that
    are not content, are known when the prompt is (`with_prompt`).
    """

    prompts: tuple[WrittenPrompt, ...]
    model: str | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    usage_in_each_chunk: bool = False
    wants_facts: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    is_prompt_only: bool = False
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    includes_stop: bool = False
    skips_special_tokens: bool = True
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    truncate_to: int | None = None
    cache_salt: str = ""
    return_token_ids: bool = False
    names_tokens_by_id: bool = False
    priority: int = 0
    timeout_s: float = math.inf
    constraint: Constraint | None = None
    tool_plan: ToolPlan | None = None
    grammar: Grammar | None = None
    make_parser: MakeParser | None = None
    warnings: tuple[str, ...] = ()

    @property
    def prompt_field(self) -> str:
        """What the body calls the prompts."""
        return "messages" if isinstance(self.prompts[0], Conversation) else "prompt"

    @property
    def num_wanted_prompt_logprobs(self) -> int | None:
        """As `num_prompt_logprobs`, with those that are for `echo`."""
        wanted = (self.num_prompt_logprobs, self.num_logprobs if self.echo else None)
        return max((number for number in wanted if number is not None), default=None)

    @property
    def rules(self) -> AnswerRules:
        """What of each choice's tokens the client is to see."""
        return AnswerRules(
            stop=() if self.is_prompt_only else self.stop,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            includes_stop=self.includes_stop,
            has_logprobs=self.num_logprobs is not None and not self.is_prompt_only,
            has_prompt_logprobs=self.num_wanted_prompt_logprobs is not None,
            shows_tokens=self.return_token_ids,
            is_prompt_only=self.is_prompt_only,
        )

    @property
    def shown_token_ids(self) -> frozenset[int]:
        """Special tokens that are part of an answer's text in any case."""
        return frozenset() if self.tool_plan is None else self.tool_plan.shown_token_ids

    def with_prompt(self, text: str, grammar: Grammar | None) -> GenerationRequest:
        """The request with what its answers are after the prompt `text`; `grammar` is its constraint's, checked.

        Raises:
            InvalidRequest: as workers take it, or with the reasoning before it, the grammar has become too long.
        """
        make_parser: MakeParser = PlainText
        if self.tool_plan is not None:
            make_parser = self.tool_plan.parser_after(text)
            grammar = None if grammar is None else self.tool_plan.answers.after_reasoning(grammar, text)
        if grammar is not None and self.constraint is not None:
            refuse_too_long(grammar, self.constraint.field)
        if grammar is None and make_parser is PlainText:
            return self
        return replace(self, grammar=grammar, make_parser=None if make_parser is PlainText else make_parser)

    def parser(self) -> DeltaParser:
        """A new reader of one answer's text."""
        return PlainText() if self.make_parser is None else self.make_parser()

    def kept_tokens(self, max_model_len: int) -> int | None:
        """How many of a prompt's last tokens count; None: all, or it is too long."""
        if self.truncate_to != -1:
            return self.truncate_to
        return max(1, max_model_len - (self.max_tokens or 1))

    def sampling(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """The sampling parameters for a prompt of `num_prompt_tokens` tokens in a context of `max_model_len`. A missing
        seed is drawn here.

        Raises:
            ContextLengthExceeded: prompt and output do not fit the context.
            InvalidRequest: `min_tokens` is more than the output may have.
        """
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens, and this model's maximum context length is "
                f"{max_model_len} tokens, which leaves no room for an answer; shorten the prompt",
                param=self.prompt_field,
            )
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {self.max_tokens} more, "
                f"but this model's maximum context length is {max_model_len} tokens; shorten the prompt or ask for at "
                f"most {room}",
                param="max_tokens",
            )
        max_tokens = self.max_tokens or min(room, self.default_max_tokens or room)
        if self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} but the answer has at most {max_tokens} tokens; "
                "lower min_tokens or raise max_tokens",
                param="min_tokens",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            seed=secrets.randbits(SEED_BITS) if self.seed is None else kept_seed(self.seed),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            logprobs=None if self.is_prompt_only else self.num_logprobs,
            prompt_logprobs=self.num_wanted_prompt_logprobs,
            grammar=self.grammar,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_word_token_ids,
        )


def kept_seed(seed: int) -> int:
    """The bits of a seed that count."""
    return seed & ((1 << SEED_BITS) - 1)


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest if one of `token_ids` is none of the model's `vocab_size` tokens."""
    if (largest := max(token_ids, default=0)) >= vocab_size:
        raise InvalidRequest(
            f"{field} has the token id {largest}; the model's ids end at {vocab_size - 1}", param=field
        )
