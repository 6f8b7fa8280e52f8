"""Calls of tools and reasoning on `/v1/responses` and `/v1/messages`, of a model that has both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from support.gateway import (
    CHAT_TEMPLATE,
    MODEL,
    ScriptedService,
    error_of,
    in_process,
    named_events,
    says,
    tiny_tokenizer,
)

from twinpool.coordinator.gateway.routes import create_app
from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.tokenizer import Tokenizer
from twinpool.request import GrammarKind

TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}"
    + CHAT_TEMPLATE
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
THOUGHT_AND_CALL = (
    '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"at": "Bonn"}}\n</tool_call>'
)
RESPONSE = {"input": "Rain?", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
MESSAGE = {
    "messages": [{"role": "user", "content": "Rain?"}],
    "max_tokens": 200,
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
}


@pytest.fixture
async def service() -> AsyncIterator[ScriptedService]:
    service = ScriptedService(max_model_len=4096)
    service.script = says(THOUGHT_AND_CALL)
    yield service
    service.assert_settled()


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    tiny = tiny_tokenizer()
    template = ChatTemplate(TEMPLATE, {"eos_token": "<|im_end|>"})
    app = create_app(service, Tokenizer(tiny.backend, tiny.eos_token_ids, template), MODEL)
    async with httpx.AsyncClient(transport=in_process(app), base_url="http://gateway") as client:
        yield client


async def test_a_response_has_reasoning_and_calls_as_items(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/responses", json=RESPONSE)).json()
    reasoning, *_, call = whole["output"]
    assert reasoning["content"][0]["text"].strip() == "Hm."
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"]) == {"at": "Bonn"}
    details = whole["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < whole["usage"]["output_tokens"]
    found = named_events((await client.post("/v1/responses", json={**RESPONSE, "stream": True})).text)
    final = found[-1]["response"]
    assert [item["type"] for item in final["output"]] == [item["type"] for item in whole["output"]]
    assert final["output"][-1]["arguments"] == call["arguments"]
    assert final["usage"] == whole["usage"]
    deltas = [e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]


async def test_a_message_has_thinking_and_tool_use_as_blocks(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/messages", json=MESSAGE)).json()
    thinking, *_, use = whole["content"]
    assert thinking["type"] == "thinking"
    assert thinking["thinking"].strip() == "Hm."
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "weather", {"at": "Bonn"})
    assert whole["stop_reason"] == "tool_use"
    found = named_events((await client.post("/v1/messages", json={**MESSAGE, "stream": True})).text)
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    arguments = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
    assert json.loads(arguments) == use["input"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_is_asked_for_has_a_grammar(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    await client.post("/v1/responses", json={**RESPONSE, "tool_choice": "required"})
    await client.post("/v1/messages", json={**MESSAGE, "tool_choice": {"type": "tool", "name": "weather"}})
    for submission in service.submissions:
        assert submission.sampling.grammar is not None
        assert submission.sampling.grammar.kind is GrammarKind.LARK


async def test_turns_with_calls_are_what_the_chat_route_makes_of_them(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    """What an answer said goes back in any of three forms, and is the same prompt."""
    function = {"name": "weather", "arguments": '{"at":"Bonn"}'}
    chat = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "wet"},
    ]
    items = [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": "wet"},
    ]
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"at": "Bonn"}}
    turns = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "wet"}]},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    await client.post("/v1/chat/completions", json={"messages": chat, "tools": tools})
    await client.post("/v1/responses", json={**RESPONSE, "input": items})
    await client.post("/v1/messages", json={**MESSAGE, "messages": turns})
    of_chat, of_response, of_message = (s.prompt_token_ids for s in service.submissions)
    assert "<think>Hm.</think>" in tiny_tokenizer().decode(of_chat)
    assert of_chat == of_response == of_message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {**RESPONSE, "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ("/v1/responses", {**RESPONSE, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ("/v1/responses", {**RESPONSE, "tool_choice": "often"}, "tool_choice"),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
            "tools[0].parameters",
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "text.format.schema",
        ),
    ],
)
async def test_what_is_wrong_with_tools_is_named_as_the_client_called_it(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    assert error_of(await client.post(path, json=body), 400)["param"] == param


async def test_a_wrong_input_schema_is_named_so(client: httpx.AsyncClient) -> None:
    body = {**MESSAGE, "tools": [{"name": "weather", "input_schema": {"type": "array"}}]}
    response = await client.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert "tools[0].input_schema" in response.json()["error"]["message"]
