"""The real `openai` client against a real server with two pools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.server import Server, serving

pytestmark = pytest.mark.timeout(120)
MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[dict[str, str]] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--prefill", "1", "--decode", "1") as server:
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
    assert chunks[-1].usage == whole.usage


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


def test_the_process_list_shows_the_roles(server: Server) -> None:
    """An operator sees which process is which worker."""
    titles = [Path(f"/proc/{pid}/cmdline").read_text().strip("\0") for pid in server.worker_pids().values()]
    assert sorted(title.split(" --id")[0] for title in titles) == [
        "twinpool worker --role decode",
        "twinpool worker --role prefill",
    ]


def test_int8_weights_give_the_known_answer_too(tmp_path: Path) -> None:
    """Both pools agree on the rounded weights, and hand over."""
    with serving(tmp_path, "--prefill", "1", "--decode", "1", "--weights", "int8") as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=30
            )
        assert answer.choices[0].message.content == "The capital of France is Paris."
        server.wait_until_empty()
