"""The real `openai` client on `/v1/responses` of a gateway over a scripted coordinator."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import ResponseFailedEvent
from support.gateway import MODEL, says, tiny_tokenizer
from support.http_gateway import running

from twinpool.coordinator.service import Output
from twinpool.errors import RequestFailed


async def test_the_clients_own_stream_ends_with_what_a_whole_answer_is() -> None:
    async with running() as gateway, gateway.openai() as client:
        gateway.service.script = says("the quick brown fox")
        whole = await client.responses.create(model=MODEL, input="Hi", instructions="the fox")
        async with client.responses.stream(model=MODEL, input="Hi", instructions="the fox") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert whole.output_text == final.output_text == "".join(deltas) == "the quick brown fox"
        assert (final.status, final.usage) == (whole.status, whole.usage)


async def test_what_an_answer_said_can_be_sent_back_as_input() -> None:
    async with running() as gateway, gateway.openai() as client:
        gateway.service.script = says("the fox")
        first = await client.responses.create(model=MODEL, input="Hi")
        turns = [
            {"role": "user", "content": "Hi"},
            *first.to_dict()["output"],
            {"role": "user", "content": "And?"},
        ]
        await client.responses.create(model=MODEL, input=turns)  # type: ignore[arg-type]  # plain objects are taken
        prompt = tiny_tokenizer().decode(gateway.service.submissions[-1].prompt_token_ids)
        assert prompt.split("\n") == ["user", "Hi", "assistant", "the fox", "user", "And?", "assistant", ""]


async def test_a_stream_that_breaks_is_a_failed_response_to_the_client() -> None:
    ids = tuple(tiny_tokenizer().encode("the fox"))
    async with running() as gateway, gateway.openai() as client:
        gateway.service.script = lambda _: [Output(ids, 0), RequestFailed("the worker died; try again")]
        events = [
            event async for event in await client.responses.create(model=MODEL, input="Hi", stream=True)
        ]
        assert isinstance(events[-1], ResponseFailedEvent)
        assert events[-1].response.error is not None
        assert events[-1].response.error.message == "the worker died; try again"


async def test_a_previous_answer_is_refused_as_the_clients_own_error() -> None:
    async with running() as gateway, gateway.openai() as client:
        with pytest.raises(openai.BadRequestError, match="send the turns so far") as refused:
            await client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
