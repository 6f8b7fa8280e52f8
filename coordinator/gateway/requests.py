"""From a JSON body to a checked request, and to sampling parameters once the prompt's length is known.

Defaults are OpenAI's: temperature 1, nothing cut off. A model's generation_config does not change them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.coordinator.gateway.answer import AnswerRules
from twinpool.coordinator.gateway.bodies import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_body,
    ignored_fields,
    read_object,
)
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.conversations import Conversation, conversation
from twinpool.coordinator.gateway.deltas import MakeParser
from twinpool.errors import ContextLengthExceeded, InvalidRequest
from twinpool.request import Grammar, SamplingParams

COMPLETION_MAX_TOKENS = 16
"""Output tokens of `/v1/completions` when the request does not say, as OpenAI and vLLM have it."""
MIN_TEMPERATURE = 1e-3
"""Below it, 0 apart, logits divided by the temperature leave float32's range."""
SEED_BITS = 63
LARGEST_TOP_K = 2**31 - 1
"""More tokens than any vocabulary has: a larger `top_k` means the same, and would not fit a message."""
MAX_BIAS = 100
_BIAS_KEY_CHARS = 10

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
    answer must be complete; it may be infinite. `make_parser`: the text has parts that are not content.
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
                f"the prompt has {num_prompt_tokens} tokens and the context holds {max_model_len}, "
                "which leaves no room for an answer; shorten the prompt",
                param=self.prompt_field,
            )
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {self.max_tokens} more, "
                f"but the context holds {max_model_len}; shorten the prompt or ask for at most {room}",
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
        )


def kept_seed(seed: int) -> int:
    """The bits of a seed that count."""
    return seed & ((1 << SEED_BITS) - 1)


def parse_completion(data: bytes) -> GenerationRequest:
    """Reads the body of `/v1/completions`.

    Raises:
        InvalidRequest: bad JSON, a wrong type or value, or a field that is not supported.
    """
    raw = read_object(data)
    body = check_body(raw, CompletionBody)
    if body.logprobs is True:
        message = (
            "logprobs is true; it must be how many of the likeliest tokens to tell beside each, from 0 to 20"
        )
        raise InvalidRequest(message, param="logprobs")
    num_logprobs = None if body.logprobs is False else body.logprobs
    prompts = _completion_prompts(body.prompt)
    return GenerationRequest(
        prompts=prompts,
        echo=bool(body.echo),
        num_logprobs=num_logprobs,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        **_common(body, len(prompts), may_be_prompt_only=bool(body.echo)),
        add_special_tokens=body.add_special_tokens is not False,
        warnings=_warnings(ignored_fields(raw, CompletionBody)),
    )


def parse_chat(data: bytes) -> GenerationRequest:
    """Reads the body of `/v1/chat/completions`.

    Raises:
        InvalidRequest: bad JSON, a wrong type or value, or a field that is not supported.
    """
    return chat_request(read_object(data))


def chat_request(raw: dict[str, Any]) -> GenerationRequest:
    """The chat request with these fields. Raises InvalidRequest."""
    body = check_body(raw, ChatBody)
    if body.top_logprobs and not body.logprobs:
        message = (
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true; set logprobs to true as well"
        )
        raise InvalidRequest(message, param="top_logprobs")
    return GenerationRequest(
        prompts=(conversation(body),),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **_common(body, 1, may_be_prompt_only=False),
        add_special_tokens=bool(body.add_special_tokens),
        warnings=_warnings(ignored_fields(raw, ChatBody)),
    )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest if one of `token_ids` is none of the model's `vocab_size` tokens."""
    if (largest := max(token_ids, default=0)) >= vocab_size:
        raise InvalidRequest(
            f"{field} has the token id {largest}; the model's ids end at {vocab_size - 1}", param=field
        )


def parse_timeout_header(text: str | None) -> float:
    """The seconds of an `X-Request-Timeout` header; infinite without one. Raises InvalidRequest."""
    if text is None:
        return math.inf
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        message = f"X-Request-Timeout is {text[:80]!r}; it must be a number of seconds above 0"
        raise InvalidRequest(message, param="X-Request-Timeout")
    return timeout_s


def _common(body: GenerationBody, num_prompts: int, *, may_be_prompt_only: bool) -> dict[str, Any]:
    """The fields of a GenerationRequest that both routes have."""
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        message = "stream_options is for streams only; set stream to true or leave it out"
        raise InvalidRequest(message, param="stream_options")
    if stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs is not available in a stream; set stream to false or leave it out"
        raise InvalidRequest(message, param="prompt_logprobs")
    temperature = 1.0 if body.temperature is None else body.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"temperature is {temperature}; it must be 0 (greedy) or at least {MIN_TEMPERATURE}",
            param="temperature",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise InvalidRequest(
            "stop has an empty string, which would end every answer; leave it out", param="stop"
        )
    max_tokens = _max_tokens(body)
    if max_tokens == 0 and not may_be_prompt_only and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens is 0; it must be an integer >= 1", param="max_tokens")
    options = body.stream_options
    include_usage = stream and bool((options and options.include_usage) or body.twinpool)
    return {
        "model": body.model,
        "n": _num_choices(body, num_prompts),
        "stream": stream,
        "include_usage": include_usage,
        "usage_in_each_chunk": include_usage and bool(options and options.continuous_usage_stats),
        "wants_facts": bool(body.twinpool),
        "stop": stop,
        "max_tokens": 1 if max_tokens == 0 else max_tokens,
        "is_prompt_only": max_tokens == 0,
        "min_tokens": body.min_tokens or 0,
        "temperature": temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": min(max(body.top_k or 0, 0), LARGEST_TOP_K),
        "min_p": body.min_p or 0.0,
        "seed": body.seed,
        "repetition_penalty": 1.0 if body.repetition_penalty is None else body.repetition_penalty,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "logit_bias": _biases(body.logit_bias or {}),
        "ignore_eos": bool(body.ignore_eos),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "includes_stop": bool(body.include_stop_str_in_output),
        "skips_special_tokens": body.skip_special_tokens is not False,
        "num_prompt_logprobs": body.prompt_logprobs,
        "truncate_to": _truncation(body),
        "cache_salt": body.cache_salt or "",
        "return_token_ids": bool(body.return_token_ids),
        "names_tokens_by_id": bool(body.return_tokens_as_token_ids),
        "priority": body.priority or 0,
        "timeout_s": math.inf if body.timeout is None else body.timeout,
    }


def _max_tokens(body: GenerationBody) -> int | None:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; "
            "they mean the same, so send one of them",
            param="max_completion_tokens",
        )
    return next(iter(limits), None)


def _num_choices(body: GenerationBody, num_prompts: int) -> int:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(
            f"best_of is {body.best_of} and n is {n}; answers are not picked among more, so leave best_of out",
            param="best_of",
        )
    if n * num_prompts > MAX_CHOICES:
        raise InvalidRequest(
            f"n is {n} for each of {num_prompts} prompts, which is {n * num_prompts} answers; ask for at most "
            f"{MAX_CHOICES} in one request",
            param="n" if n > 1 else "prompt",
        )
    return n


def _truncation(body: GenerationBody) -> int | None:
    if body.truncate_prompt_tokens == 0:
        message = (
            "truncate_prompt_tokens is 0, which leaves no prompt; set it to 1 or more, or to -1 for what fits"
        )
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    return body.truncate_prompt_tokens


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _BIAS_KEY_CHARS):
            message = f"logit_bias has the key {shown(key)}; its keys must be token ids, as strings"
            raise InvalidRequest(message, param="logit_bias")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias of token {key} is {bias}; it must be from -{MAX_BIAS} to {MAX_BIAS}",
                param="logit_bias",
            )
    return tuple({int(key): bias for key, bias in biases.items()}.items())


def _completion_prompts(prompt: str | list[Any]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise InvalidRequest("prompt is an empty list; send a text or a list of token ids", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return (tuple(prompt),)
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, list) for item in prompt):
        return tuple(map(tuple, prompt))
    raise InvalidRequest(
        f"prompt is a list of {len(prompt)} that are not of one kind; send texts, lists of token ids, or the token ids "
        "of one prompt",
        param="prompt",
    )


def _warnings(ignored: tuple[str, ...]) -> tuple[str, ...]:
    return (f"ignored fields: {', '.join(ignored)}",) if ignored else ()
