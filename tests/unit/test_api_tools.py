"""Chat answers with reasoning and calls of tools, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.gateway import MODEL, ScriptedService, events, in_process, says, tiny_tokenizer

from twinpool.coordinator.gateway.routes import create_app
from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.tokenizer import Tokenizer
from twinpool.request import FinishReason

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think></think> #}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>Let me see.</think>\n\nLooking.\n{CALL}\n{CALL}"


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway to a model that thinks and calls tools in the format of Hermes."""
    tokenizer = Tokenizer(
        tiny_tokenizer().backend, tiny_tokenizer().eos_token_ids, ChatTemplate(TEMPLATE, {})
    )
    transport = in_process(create_app(service, tokenizer, MODEL))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def whole(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    """The only choice of the answer."""
    response = await client.post(CHAT, json={**HELLO, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    found: dict[str, Any] = choice
    return found


async def streamed(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    """The same, put together as clients do."""
    *chunks, done = events((await client.post(CHAT, json={**HELLO, **fields, "stream": True})).text)
    assert done == "[DONE]"
    message: dict[str, Any] = {"calls": {}}
    logprobs: list[Any] = []
    for choice in (chunk["choices"][0] for chunk in chunks):
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for part in value:
                call = message["calls"].setdefault(part["index"], {"arguments": ""})
                call |= {key: part[key] for key in ("id", "type") if key in part}
                call |= {key: text for key, text in part["function"].items() if key != "arguments"}
                call["arguments"] += part["function"].get("arguments", "")
        logprobs += (choice["logprobs"] or {}).get("content", [])
    return {
        "message": message,
        "finish_reason": chunks[-1]["choices"][0]["finish_reason"],
        "logprobs": logprobs,
    }


async def test_reasoning_content_and_calls_are_parts_of_the_message(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says(ANSWER)
    choice = await whole(client)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert "Let me see." in message["reasoning_content"]
    assert message["content"].strip() == "Looking."
    assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    for call in message["tool_calls"]:
        assert call.keys() == {"id", "type", "function"}
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_stream_says_the_same(
    client: httpx.AsyncClient, service: ScriptedService, logprobs: bool
) -> None:
    service.script = says(ANSWER)
    expected = await whole(client, logprobs=logprobs)
    got = await streamed(client, logprobs=logprobs)
    message = got["message"]
    assert got["finish_reason"] == "tool_calls"
    assert message["role"] == "assistant"
    for name in ("content", "reasoning_content"):
        assert message[name] == expected["message"][name]
    for index, call in enumerate(expected["message"]["tool_calls"]):
        assert message["calls"][index]["name"] == "weather"
        assert message["calls"][index]["arguments"] == call["function"]["arguments"]
    assert got["logprobs"] == ((expected["logprobs"] or {}).get("content", []))


async def test_an_answer_of_calls_alone_has_no_content(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says(CALL)
    message = (await whole(client))["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_an_answer_without_calls_stops_as_ever(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("No.")
    choice = await whole(client)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "No.")
    assert "tool_calls" not in choice["message"]
    service.script = says(CALL, FinishReason.LENGTH)
    assert (await whole(client))["finish_reason"] == "length"


async def test_the_template_gets_tools_and_earlier_calls(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("Fine.")
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    messages = [
        *HELLO["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    service.max_model_len = 4096
    await whole(client, messages=messages)
    prompt = tiny_tokenizer().decode(service.submission.prompt_token_ids, skip_special_tokens=False)
    assert '<tools>[{"type": "function", "function": {"name": "weather"' in prompt
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


async def test_of_each_choice_the_calls_are_its_own(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = lambda s: says(CALL if s.request_id.endswith("#1") else "No.")(s)
    answer = (await client.post(CHAT, json={**HELLO, "n": 2})).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "tool_calls"]
