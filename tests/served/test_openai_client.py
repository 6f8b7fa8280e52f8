"""The real `openai` client against a real server with two pools."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from support.clients import MODEL
from support.gateway import named_events
from support.server import Server, serving
from support.tool_model import tool_model

pytestmark = pytest.mark.timeout(120)
QUESTION: list[dict[str, str]] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tool_model(tmp_path_factory.mktemp("model"))
    settings = ("--served-model-name", MODEL, "--prefill", "1", "--decode", "1")
    with serving(tmp_path_factory.mktemp("server"), str(model), *settings) as server:
        yield server
        server.wait_until_empty()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_answer_streamed_and_whole(client: openai.OpenAI) -> None:
    """The two pools give the known answer, with usage, in both ways."""
    settings = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 30}
    whole = client.chat.completions.create(**settings)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    usage, expected = chunks[-1].usage, whole.usage
    assert usage is not None
    assert expected is not None
    assert usage.prompt_tokens == expected.prompt_tokens
    assert usage.completion_tokens == expected.completion_tokens


def test_completions_and_models(client: openai.OpenAI) -> None:
    """The older route and the list of models."""
    assert MODEL in [model.id for model in client.models.list()]
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=6, temperature=0)
    assert answer.choices[0].text.startswith(" 5")


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    """Unknown model, too long a request, a wrong value: each the exception that users catch."""
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=10)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)


def test_several_answers_keep_apart(client: openai.OpenAI) -> None:
    """Three answers, streamed with their indices and whole, are the same; with noise they differ among themselves."""
    settings = {"model": MODEL, "messages": QUESTION, "n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 20}
    whole = client.chat.completions.create(**settings)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert list(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert streamed == texts
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


def test_log_probabilities_streamed_and_whole(client: openai.OpenAI) -> None:
    """An entry for each token of the answer, the first too; greedy tokens are the likeliest."""
    settings = {
        "model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 20, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    assert whole.usage is not None
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in entries)
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    shown = b"".join(bytes(entry.bytes) for entry in entries if entry.bytes).decode()
    assert shown.startswith(whole.choices[0].message.content)
    streamed = []
    for chunk in client.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
    assert streamed == entries


def test_a_forced_tool_is_called_with_arguments_that_follow_its_schema(client: openai.OpenAI) -> None:
    """Whole, and as deltas of arguments in a stream."""
    settings = {
        "model": MODEL, "temperature": 0, "max_tokens": 120, "tools": [WEATHER], "tool_choice": "required",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    (call, *_) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    with client.chat.completions.stream(**settings) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed[0].function.arguments == call.function.arguments
    assert streamed[0].function.name == "weather"


class Person(pydantic.BaseModel):
    """What the structured answer is."""

    name: str
    age: int


def test_a_structured_answer_is_parsed(client: openai.OpenAI) -> None:
    """By the client's own helper, into its user's class."""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Ann is 31 years old. Who is it?"}],
        temperature=0,
        max_tokens=100,
        response_format=Person,
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert person.name


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    """The newer route: the text, and the events that lead to it."""
    settings = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 30}
    whole = client.responses.create(**settings)
    assert whole.status == "completed"
    assert whole.output_text == "The capital of France is Paris."
    with client.responses.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert final.usage.input_tokens_details.cached_tokens > 0
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_anthropics_route_gives_the_known_answer_too(server: Server) -> None:
    """Whole and as events, with the tokens that a cache had apart from the others."""
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 30}
    whole = server.post("/v1/messages", body).json()
    assert whole["content"] == [{"type": "text", "text": "The capital of France is Paris."}]
    assert whole["stop_reason"] == "end_turn"
    events = named_events(server.post("/v1/messages", {**body, "stream": True}).text)
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    usage = events[-2]["usage"]
    assert usage["cache_read_input_tokens"] > 0
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert usage["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_process_list_shows_the_roles(server: Server) -> None:
    """An operator sees which process is which worker."""
    titles = [Path(f"/proc/{pid}/cmdline").read_text().strip("\0") for pid in server.worker_pids().values()]
    assert sorted(title.split(" --id")[0] for title in titles) == [
        "twinpool worker --role decode",
        "twinpool worker --role prefill",
    ]


def test_a_structured_answer_goes_on_after_its_decode_worker_was_killed(
    client: openai.OpenAI, server: Server
) -> None:
    """Another process takes it up in the middle of its grammar: it is the answer that it would have been."""
    place = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "founded": {"type": "integer", "minimum": 1, "maximum": 2000},
        },
        "required": ["city", "founded"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": place, "minItems": 8, "maxItems": 8}
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "List eight cities of Europe."}],
        "temperature": 0.8,
        "seed": 5,
        "max_tokens": 2000,
        "response_format": {"type": "json_schema", "json_schema": {"name": "cities", "schema": schema}},
    }
    undisturbed = client.chat.completions.create(**settings).choices[0]
    parts, pid = list[str](), server.worker_pids()["decode-0"]
    for number, chunk in enumerate(client.chat.completions.create(**settings, stream=True)):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        if number == 30:
            os.kill(pid, signal.SIGKILL)
    assert "".join(parts) == undisturbed.message.content
    assert undisturbed.finish_reason == "stop"
    cities = json.loads("".join(parts))
    assert len(cities) == 8
    assert all(city.keys() == {"city", "founded"} and 1 <= city["founded"] <= 2000 for city in cities)
    assert server.worker_pids()["decode-0"] != pid, "nobody was killed"


def test_int8_weights_give_the_known_answer_too(tmp_path: Path) -> None:
    """Both pools agree on the rounded weights, and hand over."""
    with serving(tmp_path, "--prefill", "1", "--decode", "1", "--weights", "int8") as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=30
            )
        assert answer.choices[0].message.content == "The capital of France is Paris."
        server.wait_until_empty()
