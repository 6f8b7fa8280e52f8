"""The events of a streamed message, the body of a whole one, and errors, as Anthropic's clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twinpool.coordinator.gateway.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallBegin
from twinpool.coordinator.gateway.messages_api.errors import messages_error_json, speaks_messages
from twinpool.coordinator.gateway.messages_api.events import MessageEnd, MessageWriter, PromptUsage
from twinpool.errors import (
    BodyTooLarge,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    QueueFull,
    RequestCancelled,
    RequestError,
    RequestFailed,
    Unauthorized,
)
from twinpool.request import FinishReason

PROMPT = PromptUsage(num_tokens=9, num_cached=4)
STOPPED = MessageEnd(FinishReason.STOP, None, 5)
CALL: list[Delta] = [
    ToolCallBegin(0, "call_1", "weather"),
    ToolCallArguments(0, '{"at":'),
    ToolCallArguments(0, '"Bonn"}'),
]


def events(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        head, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {found[-1]['type']}"
    return found


def streamed(deltas: list[Delta], end: MessageEnd = STOPPED) -> list[dict[str, Any]]:
    stream = MessageWriter("r1", "tiny")
    opening = stream.opening(PROMPT)
    pieces = [stream.add([delta]) for delta in deltas]
    return events(opening + b"".join(pieces) + stream.closing(PROMPT, end))


def whole(deltas: list[Delta], end: MessageEnd = STOPPED) -> dict[str, Any]:
    answer = MessageWriter("r1", "tiny")
    answer.add(deltas)
    value: dict[str, Any] = json.loads(answer.whole(PROMPT, end))
    return value


def test_a_text_has_its_events_in_anthropics_order() -> None:
    found = streamed([Content("Par"), Content("is")])
    assert found == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_r1",
                "type": "message",
                "role": "assistant",
                "model": "tiny",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {
                    "input_tokens": 5,
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": 4,
                    "output_tokens": 0,
                },
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Par"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "is"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {
                "input_tokens": 5,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 5,
            },
        },
        {"type": "message_stop"},
    ]


def test_thinking_text_and_tools_are_blocks_of_their_own() -> None:
    found = streamed([Reasoning("Hm."), Content("I look."), *CALL])
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
    ]
    deltas = [(event["index"], event["delta"]) for event in found if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "Hm."}),
        (1, {"type": "text_delta", "text": "I look."}),
        (2, {"type": "input_json_delta", "partial_json": '{"at":'}),
        (2, {"type": "input_json_delta", "partial_json": '"Bonn"}'}),
    ]
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1, 2]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_whole_message_has_the_same_blocks() -> None:
    message = whole([Reasoning("Hm."), Content("I look."), *CALL])
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"at": "Bonn"}},
    ]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("tool_use", 5)


@pytest.mark.parametrize(
    ("deltas", "end", "reason", "sequence"),
    [
        ([Content("a")], STOPPED, "end_turn", None),
        ([Content("a")], MessageEnd(FinishReason.LENGTH, None, 5), "max_tokens", None),
        ([Content("a")], MessageEnd(FinishReason.STOP, "END", 5), "stop_sequence", "END"),
        (CALL, STOPPED, "tool_use", None),
        (CALL[:2], MessageEnd(FinishReason.LENGTH, None, 5), "max_tokens", None),
        ([], STOPPED, "end_turn", None),
    ],
)
def test_why_a_message_ends(deltas: list[Delta], end: MessageEnd, reason: str, sequence: str | None) -> None:
    expected = {"stop_reason": reason, "stop_sequence": sequence}
    assert streamed(deltas, end)[-2]["delta"] == expected
    assert expected.items() <= whole(deltas, end).items()


def test_a_tools_input_that_breaks_off_is_handed_on_as_text() -> None:
    (block,) = whole(CALL[:2], MessageEnd(FinishReason.LENGTH, None, 5))["content"]
    assert block["input"] == {"INVALID_JSON": '{"at":'}


def test_a_tool_may_need_no_input() -> None:
    (block,) = whole([ToolCallBegin(0, "call_1", "clock")])["content"]
    assert block["input"] == {}


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    stream = MessageWriter("r1", "tiny")
    begun = stream.opening(PROMPT) + stream.add([Content("Par")])
    last = events(begun + stream.failed(RequestFailed("the worker died; try again")))[-1]
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "the worker died; try again"},
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("no"), "invalid_request_error"),
        (Unauthorized("no"), "authentication_error"),
        (ModelNotFound("no"), "not_found_error"),
        (BodyTooLarge("no"), "request_too_large"),
        (QueueFull("no", retry_after_s=1), "rate_limit_error"),
        (RequestCancelled("no"), "invalid_request_error"),
        (RequestFailed("no"), "api_error"),
        (NoWorker("no"), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(error: RequestError, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "r1"}
    assert json.loads(messages_error_json(error, "r1")) == expected


def test_only_the_messages_route_speaks_so() -> None:
    assert speaks_messages("/v1/messages")
    assert speaks_messages("/v1/messages/count_tokens")
    assert not speaks_messages("/v1/messages_too")
    assert not speaks_messages("/v1/responses")
