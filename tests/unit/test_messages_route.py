"""`/v1/messages` over a scripted coordinator: a whole answer, a stream, what is refused and what breaks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.gateway import MODEL, ScriptedService, in_process, named_events, says, tiny_tokenizer

from twinpool.coordinator.gateway.key_ring import KeyRing
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.service import Output
from twinpool.errors import QueueFull, RequestFailed
from twinpool.request import FinishReason

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, after checking that it has this status and Anthropic's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


async def test_a_whole_answer_is_a_message(client: httpx.AsyncClient, service: ScriptedService) -> None:
    service.script, service.num_cached = says("Paris is it"), 3
    response = await client.post(MESSAGES, json={**HELLO, "system": "the fox"})
    request_id = response.headers["x-request-id"]
    num_input = len(service.submission.prompt_token_ids)
    assert response.json() == {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Paris is it"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_input - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(tiny_tokenizer().encode("Paris is it")) + 1,
        },
    }


async def test_turns_are_what_the_chat_route_makes_of_them(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    await client.post(MESSAGES, json={**HELLO, "system": "the fox", "seed": 5, "top_k": 3})
    turns = [{"role": "system", "content": "the fox"}, *HELLO["messages"]]
    chat = {"messages": turns, "seed": 5, "top_k": 3, "max_tokens": 20}
    await client.post("/v1/chat/completions", json=chat)
    message, chat_answer = service.submissions
    assert message.prompt_token_ids == chat_answer.prompt_token_ids
    assert message.sampling == chat_answer.sampling


async def test_an_answer_goes_on_with_a_turn_that_the_assistant_began(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    turns = [*HELLO["messages"], {"role": "assistant", "content": "the quick"}]
    await client.post(MESSAGES, json={**HELLO, "messages": turns})
    assert tiny_tokenizer().decode(service.submission.prompt_token_ids).endswith("the quick")


async def test_a_stream_has_the_same_text_and_usage(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script, service.num_cached = says("the quick brown fox"), 3
    response = await client.post(MESSAGES, json={**HELLO, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = named_events(response.text)
    whole = (await client.post(MESSAGES, json=HELLO)).json()
    assert found[0]["message"]["usage"] == {**whole["usage"], "output_tokens": 0}
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole["content"][0]["text"]
    assert found[-2]["usage"] == whole["usage"]
    assert found[-2]["delta"]["stop_reason"] == "end_turn"
    assert found[-1] == {"type": "message_stop"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(
    client: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.script = says("the quick brown fox", FinishReason.LENGTH)
    body = {**HELLO, "stop_sequences": ["never", "bro"], "stream": stream}
    response = await client.post(MESSAGES, json=body)
    answer = named_events(response.text)[-2]["delta"] if stream else response.json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "bro")


async def test_an_answer_that_is_too_long_says_so(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("the quick", FinishReason.LENGTH)
    answer = (await client.post(MESSAGES, json={**HELLO, "max_tokens": 5})).json()
    assert service.submission.sampling.max_tokens == 5
    assert answer["stop_reason"] == "max_tokens"


async def test_a_stream_that_is_lost_ends_with_an_error_event(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = tuple(tiny_tokenizer().encode("the fox"))
    service.script = lambda _: [Output(ids, 0), RequestFailed("the worker died; try again")]
    found = named_events((await client.post(MESSAGES, json={**HELLO, "stream": True})).text)
    assert found[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the worker died; try again"},
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"temperature": 2}, "temperature is 2"),
        ({"max_tokens": 100_000}, "max_tokens asks for 100000"),
        ({"stop_sequences": [""]}, "empty string"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, '"image"'),
    ],
)
async def test_what_is_refused_has_anthropics_shape(
    client: httpx.AsyncClient, fields: dict[str, object], said: str
) -> None:
    error = error_of(await client.post(MESSAGES, json={**HELLO, **fields}), 400)
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]


async def test_other_errors_have_it_too(client: httpx.AsyncClient, service: ScriptedService) -> None:
    unknown = error_of(await client.post(MESSAGES, json={**HELLO, "model": "claude"}), 404)
    assert unknown["type"] == "not_found_error"
    service.refusal = QueueFull("the queue is full", retry_after_s=2)
    response = await client.post(MESSAGES, json=HELLO)
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "2"
    assert error_of(await client.get(MESSAGES), 405)["type"] == "invalid_request_error"
    assert error_of(await client.get(f"{MESSAGES}/nothing"), 404)["type"] == "not_found_error"


async def test_a_key_may_come_where_anthropics_clients_put_it(service: ScriptedService) -> None:
    """And one that is nobody's is refused, in either place."""
    app = create_app(service, tiny_tokenizer(), MODEL, keys=KeyRing(environment="amy:0123456789abcdef"))
    async with httpx.AsyncClient(transport=in_process(app), base_url="http://gateway") as client:
        answer = await client.post(MESSAGES, json=HELLO, headers={"x-api-key": "0123456789abcdef"})
        assert answer.status_code == 200
        for headers in ({"x-api-key": "0123456789abcdeX"}, {"x-api-key": ""}, {}):
            refused = await client.post(MESSAGES, json=HELLO, headers=headers)
            assert error_of(refused, 401)["type"] == "authentication_error"
    assert service.submission.tenant.name == "amy"


async def test_input_tokens_are_counted_without_an_answer(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    body = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    counted = (await client.post(COUNT, json={**body, "system": "the fox"})).json()
    assert not service.submissions
    await client.post(MESSAGES, json={**HELLO, "system": "the fox"})
    assert counted == {"input_tokens": len(service.submission.prompt_token_ids)}
    error_of(await client.post(COUNT, json={"messages": []}), 400)


async def test_the_timeline_is_found_by_the_answers_id(client: httpx.AsyncClient) -> None:
    answer = (await client.post(MESSAGES, json=HELLO)).json()
    timeline = (await client.get(f"/v1/requests/{answer['id']}/timeline")).json()
    assert f"msg_{timeline['request_id']}" == answer["id"]


async def test_what_changes_nothing_is_told_of(client: httpx.AsyncClient) -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    body = {**HELLO, "thinking": budget, "context_management": edits, "frobnicate": 1}
    warning = (await client.post(MESSAGES, json=body)).headers["x-twinpool-warning"]
    assert warning == "ignored fields: frobnicate, thinking.budget_tokens, context_management.edits"
