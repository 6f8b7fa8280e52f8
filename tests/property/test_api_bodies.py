"""Whatever JSON a client sends, it is either a request or a refusal with a reason, never a failure of the server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway import tiny_tokenizer

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.bodies import MAX_CHOICES, NOT_SUPPORTED, ChatBody, CompletionBody
from twinpool.coordinator.gateway.messages_api.body import MessagesBody
from twinpool.coordinator.gateway.messages_api.route import parse_messages
from twinpool.coordinator.gateway.parsing import parse_chat, parse_completion
from twinpool.coordinator.gateway.requests import GenerationRequest
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.coordinator.gateway.responses.route import parse_responses
from twinpool.coordinator.gateway.tools import AnswerFormat
from twinpool.errors import InvalidRequest

ANSWERS = AnswerFormat.of(tiny_tokenizer(), GatewayConfig())
PARSES: tuple[Callable[[bytes], GenerationRequest], ...] = (
    partial(parse_chat, answers=ANSWERS),
    parse_completion,
    lambda data: parse_responses(data, ANSWERS)[1],
    partial(parse_messages, answers=ANSWERS),
)
BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)
FIELDS = sorted(
    {field.name for body in BODIES for field in msgspec.structs.fields(body)}
    | set(NOT_SUPPORTED)
    | {"role", "content", "type", "text", "tool_calls", "include_usage", "unheard of"}
    | {"format", "schema", "output", "call_id", "name", "arguments", "tool_use_id", "input_schema"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "user", "text", "a`b", "é\n", "$.x[0]"])
    | st.sampled_from(["assistant", "function_call", "reasoning", "tool_use", "tool_result", "json_schema"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", 3])}, optional={"content": VALUES}),
    max_size=3,
)


@settings(max_examples=250, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    messages=MESSAGES | VALUES,
    prompt=VALUES,
)
def test_every_json_body_is_a_request_or_a_sentence(
    fields: dict[str, Any], messages: Any, prompt: Any
) -> None:
    for parse, body in (
        (PARSES[0], {"messages": messages, **fields}),
        (PARSES[1], {"prompt": prompt, **fields}),
        (PARSES[2], {"input": messages, **fields}),
        (PARSES[3], {"messages": messages, "max_tokens": 1, **fields}),
    ):
        outcome = request_or_sentence(parse, json.dumps(body).encode())
        if isinstance(outcome, GenerationRequest):
            check_request(outcome)
        else:
            assert 0 < len(outcome) < 1000
            assert "`" not in outcome.replace("a`", "")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40))
def test_every_other_body_is_refused(data: bytes) -> None:
    for parse in PARSES:
        assert isinstance(request_or_sentence(parse, data), str)


def request_or_sentence(parse: Callable[[bytes], GenerationRequest], data: bytes) -> GenerationRequest | str:
    """The request in `data`, or why it is none. Any other exception is a failure of the server."""
    try:
        return parse(data)
    except InvalidRequest as refused:
        return refused.message


def check_request(request: GenerationRequest) -> None:
    """What the workers rely on."""
    assert request.temperature == 0 or request.temperature >= 0.001
    assert math.isfinite(request.temperature)
    assert 0 < request.top_p <= 1
    assert 0 <= request.min_p <= 1
    assert request.top_k >= 0
    assert request.max_tokens is None or request.max_tokens >= 1
    assert request.min_tokens >= 0
    assert "" not in request.stop
    assert all(word.strip() for word in request.bad_words)
    assert all(token_id >= 0 for token_id in request.allowed_token_ids)
    assert all(token_id >= 0 for token_id in request.stop_token_ids)
    assert 1 <= request.n * len(request.prompts) <= MAX_CHOICES
    assert all(-100 <= bias <= 100 for _, bias in request.logit_bias)
    assert request.repetition_penalty > 0
    for prompt in request.prompts:
        if isinstance(prompt, tuple):
            assert all(isinstance(token_id, int) and token_id >= 0 for token_id in prompt)
