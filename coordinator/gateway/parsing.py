"""From a JSON body to a checked request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twinpool.bounds import MOST_BIAS, MOST_LOGPROBS
from twinpool.coordinator.gateway.bodies import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_body,
    read_object,
)
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.conversations import conversation
from twinpool.coordinator.gateway.ignored_fields import warnings_of
from twinpool.coordinator.gateway.requests import COMPLETION_MAX_TOKENS, LARGEST_TOP_K, GenerationRequest
from twinpool.coordinator.gateway.structured import Constraint, constraint_of, refuse_contradictions
from twinpool.coordinator.gateway.tools import AnswerFormat, plan
from twinpool.errors import InvalidRequest

MIN_TEMPERATURE = 1e-3
"""Below it, 0 apart, logits divided by the temperature leave float32's range."""
_BIAS_KEY_CHARS = 10


def parse_completion(data: bytes) -> GenerationRequest:
    """Reads the body of `/v1/completions`.

    Raises:
        InvalidRequest: bad JSON, a wrong type or value, or a field that is not supported.
    """
    raw = read_object(data)
    body = check_body(raw, CompletionBody)
    if body.logprobs is True:
        message = (
            "logprobs is true; it must be how many of the likeliest tokens to tell beside each, "
            f"from 0 to {MOST_LOGPROBS}"
        )
        raise InvalidRequest(message, param="logprobs")
    num_logprobs = None if body.logprobs is False else body.logprobs
    prompts = _completion_prompts(body.prompt)
    return replace(
        _common(body, len(prompts), may_be_prompt_only=bool(body.echo)),
        prompts=prompts,
        echo=bool(body.echo),
        num_logprobs=num_logprobs,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        add_special_tokens=body.add_special_tokens is not False,
        warnings=warnings_of(raw, CompletionBody),
    )


def parse_chat(data: bytes, answers: AnswerFormat) -> GenerationRequest:
    """Reads the body of `/v1/chat/completions`, to a model whose answers are `answers`.

    Raises:
        InvalidRequest: bad JSON, a wrong type or value, or a field that is not supported.
    """
    raw = read_object(data)
    wanted = chat_request(raw, answers)
    return replace(wanted, warnings=(*warnings_of(raw, ChatBody), *wanted.warnings))


def chat_request(raw: dict[str, Any], answers: AnswerFormat) -> GenerationRequest:
    """The chat request with these fields; it warns of those that its other fields leave without effect. Raises
    InvalidRequest."""
    body = check_body(raw, ChatBody)
    if body.top_logprobs and not body.logprobs:
        message = (
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true; set logprobs to true as well"
        )
        raise InvalidRequest(message, param="top_logprobs")
    tool_plan = plan(body.tools, body.tool_choice, body.parallel_tool_calls, answers)
    common = _common(body, 1, may_be_prompt_only=False)
    constraint = common.constraint
    warnings: tuple[str, ...] = ()
    if tool_plan.grammar is not None:
        refuse_contradictions("tool_choice", ignore_eos=common.ignore_eos, min_tokens=common.min_tokens)
        if constraint is not None:
            ignored = constraint.field.partition(".")[0]
            warnings = (f"{ignored} is ignored, because tool_choice says that a tool must be called",)
        constraint = Constraint(tool_plan.grammar, "tools")
    return replace(
        common,
        constraint=constraint,
        prompts=(conversation(body, tool_plan),),
        tool_plan=tool_plan,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        add_special_tokens=bool(body.add_special_tokens),
        warnings=warnings,
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


def _common(body: GenerationBody, num_prompts: int, *, may_be_prompt_only: bool) -> GenerationRequest:
    """The request as far as the fields say that both routes have: without its `num_prompts` prompts."""
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
    for word in body.bad_words or ():
        if not word.strip():
            message = f"bad_words has {shown(word)}, which is in every answer; leave it out"
            raise InvalidRequest(message, param="bad_words")
    max_tokens = _max_tokens(body, 0 if may_be_prompt_only or body.prompt_logprobs is not None else 1)
    options = body.stream_options
    include_usage = stream and bool((options and options.include_usage) or body.twinpool)
    return GenerationRequest(
        prompts=(),
        model=body.model,
        n=_num_choices(body, num_prompts),
        stream=stream,
        include_usage=include_usage,
        usage_in_each_chunk=include_usage and bool(options and options.continuous_usage_stats),
        wants_facts=bool(body.twinpool),
        stop=stop,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        is_prompt_only=max_tokens == 0,
        min_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(max(body.top_k or 0, 0), LARGEST_TOP_K),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_biases(body.logit_bias or {}),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        includes_stop=bool(body.include_stop_str_in_output),
        skips_special_tokens=body.skip_special_tokens is not False,
        num_prompt_logprobs=body.prompt_logprobs,
        truncate_to=_truncation(body),
        cache_salt=body.cache_salt or "",
        return_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        priority=body.priority or 0,
        timeout_s=math.inf if body.timeout is None else body.timeout,
        constraint=constraint_of(body, ignore_eos=bool(body.ignore_eos), min_tokens=body.min_tokens or 0),
    )


def _max_tokens(body: GenerationBody, least: int) -> int | None:
    for field in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, field)
        if value is not None and value < least:
            raise InvalidRequest(f"{field} is {value}; it must be an integer >= {least}", param=field)
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
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise InvalidRequest(
                f"logit_bias of token {key} is {bias}; it must be from -{MOST_BIAS} to {MOST_BIAS}",
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
