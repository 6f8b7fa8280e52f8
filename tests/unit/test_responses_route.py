"""`/v1/responses` over a scripted coordinator: a whole answer, a stream, what is refused and what breaks."""

from __future__ import annotations

import httpx
import pytest
from openai.types.responses import Response
from support.gateway import MODEL, ScriptedService, error_of, named_events, says, tiny_tokenizer

from twinpool.coordinator.service import Output
from twinpool.errors import RequestFailed
from twinpool.request import FinishReason

RESPONSES = "/v1/responses"
HELLO = {"input": "Hi", "model": MODEL}


async def test_a_whole_answer_is_a_response_object(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script, service.num_cached = says("Paris is it"), 3
    response = await client.post(RESPONSES, json={**HELLO, "instructions": "the fox"})
    answer = response.json()
    assert response.status_code == 200
    Response.model_validate(answer)
    request_id = response.headers["x-request-id"]
    assert (answer["id"], answer["status"], answer["model"]) == (f"resp_{request_id}", "completed", MODEL)
    (message,) = answer["output"]
    assert message["content"][0]["text"] == "Paris is it"
    num_output = len(tiny_tokenizer().encode("Paris is it")) + 1
    num_input = len(service.submission.prompt_token_ids)
    assert answer["usage"]["input_tokens"] == num_input
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert answer["usage"]["output_tokens"] == num_output
    assert answer["usage"]["total_tokens"] == num_input + num_output


async def test_input_is_what_the_chat_route_makes_of_the_same_turns(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    await client.post(RESPONSES, json={**HELLO, "instructions": "the fox", "seed": 5, "temperature": 0.5})
    turns = [{"role": "system", "content": "the fox"}, {"role": "user", "content": "Hi"}]
    chat = {"messages": turns, "seed": 5, "temperature": 0.5}
    await client.post("/v1/chat/completions", json=chat)
    response, chat_answer = service.submissions
    assert response.prompt_token_ids == chat_answer.prompt_token_ids
    assert response.sampling == chat_answer.sampling


async def test_a_stream_has_the_text_in_deltas_and_the_object_at_the_end(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("the quick brown fox")
    response = await client.post(RESPONSES, json={**HELLO, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = named_events(response.text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "the quick brown fox"
    assert found[-1]["type"] == "response.completed"
    final = found[-1]["response"]
    whole = (await client.post(RESPONSES, json=HELLO)).json()
    assert final["output"][0]["content"] == whole["output"][0]["content"]
    assert final["usage"] == whole["usage"]


async def test_an_answer_that_is_too_long_is_incomplete(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = says("the quick", FinishReason.LENGTH)
    answer = (await client.post(RESPONSES, json={**HELLO, "max_output_tokens": 5})).json()
    assert service.submission.sampling.max_tokens == 5
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_stream_that_is_lost_ends_with_a_failed_response(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    ids = tuple(tiny_tokenizer().encode("the fox"))
    service.script = lambda _: [Output(ids, 0), RequestFailed("the worker died; try again")]
    found = named_events((await client.post(RESPONSES, json={**HELLO, "stream": True})).text)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["message"] == "the worker died; try again"
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "the fox"


async def test_fields_that_nobody_knows_are_told_of(client: httpx.AsyncClient) -> None:
    response = await client.post(RESPONSES, json={**HELLO, "frobnicate": 1})
    assert "frobnicate" in response.headers["x-twinpool-warning"]
    assert "x-twinpool-warning" not in (await client.post(RESPONSES, json=HELLO)).headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "the fox " * 2000}, "input"),
    ],
)
async def test_what_is_refused_is_named_as_the_client_called_it(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    error = error_of(await client.post(RESPONSES, json={**HELLO, **fields}), 400)
    assert error["param"] == param
    assert "max_tokens" not in error["message"]


async def test_answers_are_not_kept(client: httpx.AsyncClient) -> None:
    answer = (await client.post(RESPONSES, json={**HELLO, "store": True})).json()
    assert answer["store"] is False
    for response in (
        await client.get(f"{RESPONSES}/{answer['id']}"),
        await client.delete(f"{RESPONSES}/{answer['id']}"),
        await client.get(f"{RESPONSES}/{answer['id']}/input_items"),
    ):
        error = error_of(response, 404)
        assert error["code"] == "not_stored"
        assert "input" in error["message"]


async def test_the_timeline_is_found_by_the_answers_id(client: httpx.AsyncClient) -> None:
    answer = (await client.post(RESPONSES, json=HELLO)).json()
    timeline = (await client.get(f"/v1/requests/{answer['id']}/timeline")).json()
    assert f"resp_{timeline['request_id']}" == answer["id"]


async def test_input_tokens_are_counted_without_an_answer(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    counted = (await client.post(f"{RESPONSES}/input_tokens", json=HELLO)).json()
    assert not service.submissions
    answer = (await client.post(RESPONSES, json=HELLO)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
