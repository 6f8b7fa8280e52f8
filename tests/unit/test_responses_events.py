"""The events of a streamed response and the object of a whole one, held against OpenAI's own types."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from twinpool.coordinator.gateway.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallBegin
from twinpool.coordinator.gateway.responses.body import ResponsesBody, check_responses
from twinpool.coordinator.gateway.responses.events import ResponseWriter
from twinpool.coordinator.gateway.responses.output import ResponseUsage
from twinpool.errors import RequestFailed

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = ResponseUsage(num_input=9, num_cached=4, num_output=5, num_reasoning=2)


def body(**fields: object) -> ResponsesBody:
    return check_responses({"input": "Hi", **fields})


def writer(**fields: object) -> ResponseWriter:
    return ResponseWriter(body(**fields), "r1", "tiny", 1_700_000_000)


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events, after checking that each is one of OpenAI's, named in its head, and that they are numbered."""
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        head, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert head == f"event: {value['type']}"
        EVENT.validate_python(value)
        found.append(value)
    assert all(b["sequence_number"] == a["sequence_number"] + 1 for a, b in pairwise(found))
    return found


def streamed(deltas: list[Delta], *, is_cut: bool = False) -> list[dict[str, Any]]:
    stream = writer()
    opening = stream.opening()
    pieces = [stream.piece([delta]) for delta in deltas]
    closing = stream.closing(USAGE, is_cut=is_cut)
    return events(opening + b"".join(pieces) + closing)


def whole(deltas: list[Delta], *, is_cut: bool = False) -> dict[str, Any]:
    answer = writer()
    answer.piece(deltas)
    value: dict[str, Any] = json.loads(answer.whole(USAGE, is_cut=is_cut))
    Response.model_validate(value)
    return value


def test_a_text_has_its_events_in_openais_order() -> None:
    found = streamed([Content("Par"), Content("is")])
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert found[0]["sequence_number"] == 0
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert [event["delta"] for event in found[4:6]] == ["Par", "is"]
    assert found[6]["text"] == "Paris"
    item = found[8]["item"]
    assert item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "Paris", "annotations": [], "logprobs": []}]
    assert found[9]["response"]["output"] == [item]
    assert {event.get("item_id", item["id"]) for event in found} == {item["id"]}


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    found = streamed(
        [
            Reasoning("Hm."),
            Content("I look."),
            ToolCallBegin(0, "call_1", "weather"),
            ToolCallArguments(0, '{"at":'),
            ToolCallArguments(0, '"Bonn"}'),
            ToolCallBegin(1, "call_2", "clock"),
        ]
    )
    added = [event["item"]["type"] for event in found if event["type"] == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, weather, clock = found[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert (weather["call_id"], weather["name"], weather["arguments"]) == (
        "call_1",
        "weather",
        '{"at":"Bonn"}',
    )
    assert clock["arguments"] == ""
    deltas = [e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta"]
    assert deltas == ['{"at":', '"Bonn"}']
    assert [e["text"] for e in found if e["type"] == "response.reasoning_text.done"] == ["Hm."]


def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item() -> None:
    last = streamed([Reasoning("Hm."), Content("Par")], is_cut=True)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_an_answer_without_a_word_has_an_empty_message() -> None:
    assert [event["type"] for event in streamed([])][2:5] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
    ]
    (message,) = whole([])["output"]
    assert message["content"][0]["text"] == ""


def test_a_stream_that_breaks_ends_with_what_there_is_and_why() -> None:
    stream = writer()
    begun = stream.opening() + stream.piece([Content("Par")])
    *_, last = events(begun + stream.failed(RequestFailed("the worker died; try again")))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the worker died; try again"}
    (message,) = last["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Par")


def test_a_stream_that_breaks_before_its_first_token_has_a_beginning_too() -> None:
    found = events(writer().failed(RequestFailed("the worker died; try again")))
    kinds = [event["type"] for event in found]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


def test_the_object_says_what_was_asked_for_and_what_it_took() -> None:
    answer = writer(
        instructions="Be brief.",
        max_output_tokens=5,
        temperature=0,
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        parallel_tool_calls=False,
    )
    value = json.loads(answer.whole(USAGE, is_cut=False))
    Response.model_validate(value)
    assert (value["id"], value["object"], value["created_at"]) == ("resp_r1", "response", 1_700_000_000)
    assert (value["instructions"], value["max_output_tokens"], value["temperature"]) == ("Be brief.", 5, 0)
    assert value["metadata"] == {"a": "b"}
    assert value["reasoning"]["effort"] == "low"
    assert value["tools"][0]["name"] == "f"
    assert value["tool_choice"] == {"type": "function", "name": "f"}
    assert value["text"]["format"] == {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert value["parallel_tool_calls"] is False
    assert value["store"] is False
    assert value["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }


def entry(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}


def test_log_probabilities_come_with_the_text_of_their_tokens() -> None:
    """Those of text that is held back come with the next text, or in the end; those of reasoning not at all."""
    stream = writer(include=["message.output_text.logprobs"])
    sent = stream.opening()
    sent += stream.piece([Reasoning("Hm.")], [entry("Hm.")])
    sent += stream.piece([Content("a")], [entry("a")])
    sent += stream.piece([], [entry("b")])
    sent += stream.piece([Content("bc")], [entry("c")])
    sent += stream.piece([], [entry("<eos>")])
    sent += stream.closing(USAGE, is_cut=False)
    found = events(sent)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["a"], ["b", "c"]]
    part = found[-1]["response"]["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", "c", "<eos>"]


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    texts = st.text(min_size=1, max_size=5)
    deltas: list[Delta] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from("crt"), max_size=8)):
        if kind == "c":
            deltas.append(Content(draw(texts)))
        elif kind == "r":
            deltas.append(Reasoning(draw(texts)))
        else:
            deltas.append(ToolCallBegin(num_calls, f"call_{num_calls}", draw(texts)))
            deltas += [ToolCallArguments(num_calls, text) for text in draw(st.lists(texts, max_size=3))]
            num_calls += 1
    return deltas


@given(answers(), st.booleans())
def test_a_stream_ends_with_the_object_that_a_whole_answer_is(deltas: list[Delta], is_cut: bool) -> None:
    assert streamed(deltas, is_cut=is_cut)[-1]["response"] == whole(deltas, is_cut=is_cut)
