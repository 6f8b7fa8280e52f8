"""Fields that nobody has heard of are told of, wherever in a body they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.gateway import error_of
from support.tool_answers import QWEN, answers_of

from twinpool.coordinator.gateway.bodies import ChatBody, CompletionBody
from twinpool.coordinator.gateway.ignored_fields import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    warning_headers,
    warnings_of,
)
from twinpool.coordinator.gateway.messages_api.body import MessagesBody
from twinpool.coordinator.gateway.messages_api.route import parse_messages
from twinpool.coordinator.gateway.parsing import parse_chat
from twinpool.coordinator.gateway.requests import GenerationRequest
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.coordinator.gateway.responses.route import parse_responses
from twinpool.coordinator.gateway.tools import AnswerFormat

CHAT = "/v1/chat/completions"
TURN = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "foo": 1}}


@pytest.mark.parametrize(
    ("kind", "raw", "paths"),
    [
        (ChatBody, {"messages": [TURN, {**TURN, "foo": 1}]}, "messages[1].foo"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bar": 1}]}]},
         "messages[0].content[0].bar"),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
         "messages[0].tool_calls[0].function.foo"),
        (ChatBody, {"stream_options": {"include_usage": True, "foo": 1}}, "stream_options.foo"),
        (ChatBody, {"structured_outputs": {"regex": "a", "foo": 1}}, "structured_outputs.foo"),
        (ChatBody, {"tools": [{"type": "function", "function": {"name": "f", "foo": 1}, "bar": 2}]},
         "tools[0].bar, tools[0].function.foo"),
        (ChatBody, {"tool_choice": {"type": "function", "function": {"name": "f"}, "foo": 1}}, "tool_choice.foo"),
        (ChatBody, {"foo": 1, "messages": [{**TURN, "foo": 1}]}, "foo, messages[0].foo"),
        (CompletionBody, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"foo": 1}}},
         "response_format.json_schema.foo"),
        (ResponsesBody, {"input": [{**TURN, "foo": 1}], "text": {"format": {"type": "text", "foo": 1}}},
         "input[0].foo, text.format.foo"),
        (MessagesBody, {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": [{"type": "text", "text": "a", "foo": 1}]}]}]},
         "messages[0].content[0].content[0].foo"),
    ],
)  # fmt: skip
def test_a_field_below_others_is_named_by_its_path(kind: Any, raw: dict[str, Any], paths: str) -> None:
    assert warnings_of(raw, kind) == (f"ignored fields: {paths}",)


def test_what_clients_write_freely_is_not_looked_into() -> None:
    free = {"anything": {"at": "all"}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": free}}
    function = {"name": "f", "parameters": free}
    raw = {
        "messages": [TURN],
        "response_format": schema,
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": free,
        "metadata": free,
        "logit_bias": {"5": 1},
    }
    assert warnings_of(raw, ChatBody) == ()


def test_null_is_absent_at_any_depth_and_what_answers_carry_may_come_back() -> None:
    answer = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}
    assert warnings_of({"messages": [TURN, answer], "foo": None}, ChatBody) == ()
    item = {"type": "message", "id": "m", "status": "completed", "role": "assistant", "phase": None}
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    assert warnings_of({"input": [{**item, "content": [part]}], "n": None}, ResponsesBody) == ()
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
    assert warnings_of({"messages": [{"role": "user", "content": [block]}]}, MessagesBody) == ()


def test_only_the_first_ones_are_named_and_of_long_names_the_beginning() -> None:
    many = {"messages": [{**TURN, "x" * 1000: 1} for _ in range(1000)]}
    (warning,) = warnings_of(many, ChatBody)
    names = warning.removeprefix("ignored fields: ").split(", ")
    assert len(names) == MAX_NAMES
    assert {len(name) for name in names} == {MAX_NAME_CHARS}


def test_values_of_a_wrong_type_are_left_to_the_check_of_types() -> None:
    raw: dict[str, Any] = {"messages": [1, None, "a", [{"foo": 1}]], "stream_options": 5, "tools": {"foo": 1}}
    assert warnings_of(raw, ChatBody) == ("ignored fields: tools.foo",)


_SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
_ASKED = {"messages": [TURN], "tools": [{"type": "function", "function": {"name": "f"}}]}


def _read_responses(data: bytes, answers: AnswerFormat) -> GenerationRequest:
    return parse_responses(data, answers)[1]


@pytest.mark.parametrize(
    ("read", "raw", "forced", "field"),
    [
        (parse_chat, _ASKED | {"response_format": {"type": "json_object"}}, "required", "response_format"),
        (parse_chat, _ASKED | {"guided_regex": "a+"}, "required", "guided_regex"),
        (
            _read_responses,
            {"input": "Hi", "text": {"format": _SCHEMA}, "tools": [{"type": "function", "name": "f"}]},
            "required",
            "text.format",
        ),
        (
            parse_messages,
            {
                "messages": [TURN],
                "max_tokens": 5,
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            },
            {"type": "any"},
            "output_config.format",
        ),
    ],
)
def test_a_form_of_the_answer_beside_a_tool_that_must_be_called_is_told_of(
    read: Callable[[bytes, AnswerFormat], GenerationRequest], raw: dict[str, Any], forced: Any, field: str
) -> None:
    answers = answers_of(QWEN)
    assert read(json.dumps(raw).encode(), answers).warnings == ()
    (warning,) = read(json.dumps({**raw, "tool_choice": forced}).encode(), answers).warnings
    assert warning == f"{field} is ignored, because tool_choice says that a tool must be called"


def test_without_warnings_there_is_no_header() -> None:
    assert warning_headers(()) == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{**TURN, "foo": 1}]}),
        ("/tokenize", {"messages": [{**TURN, "foo": 1}]}),
        ("/v1/messages", {"messages": [{**TURN, "foo": 1}], "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": [{**TURN, "foo": 1}]}),
    ],
)
async def test_each_route_tells_of_them(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-twinpool-warning"] == "ignored fields: messages[0].foo"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "the"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
    ],
)
async def test_each_route_tells_of_its_own(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body | {"foo": 1, "bar": None})
    assert answer.headers["x-twinpool-warning"] == "ignored fields: foo"
    assert "x-twinpool-warning" not in (await client.post(path, json=body)).headers


async def test_the_document_says_so_of_each_route_that_reads_a_body(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for operation in (operation for methods in paths.values() for operation in methods.values()):
        is_warned = "X-Twinpool-Warning" in operation["responses"]["200"]["headers"]
        assert is_warned == ("requestBody" in operation)


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "text"])
async def test_a_schema_in_the_place_of_other_servers_is_refused(
    client: httpx.AsyncClient, kind: str
) -> None:
    wanted = {"type": kind, "schema": {"type": "object"}}
    error = error_of(await client.post(CHAT, json={"messages": [TURN], "response_format": wanted}), 400)
    assert error["param"] == "response_format.schema"
    assert "response_format.json_schema.schema" in error["message"]
