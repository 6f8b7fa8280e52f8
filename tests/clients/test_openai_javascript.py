"""The `openai` package for JavaScript against a real server with two pools."""

from __future__ import annotations

from typing import Any

import pytest
from support.clients import ANSWER, MODEL, environment_of, findings, needs, node
from support.server import Server

pytestmark = needs("openai-js")


@pytest.fixture(scope="module")
def found(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What programs/openai_client.mjs found."""
    home = {"CLIENT_HOME": str(environment_of("openai-js"))}
    return findings(node("openai-js"), "openai_client.mjs", server, tmp_path_factory.mktemp("js"), home)


def test_chats_whole_and_streamed_are_the_same(found: dict[str, Any]) -> None:
    whole, streamed = found["whole"], found["streamed"]
    assert whole["text"] == streamed["text"] == found["helper"]["text"] == ANSWER
    assert whole["finish"] == streamed["finish"] == found["helper"]["finish"] == "stop"
    assert whole["usage"]["completion_tokens"] == streamed["usage"]["completion_tokens"]
    assert streamed["role"] == "assistant"


def test_several_prompts_and_answers_have_their_indices_and_log_probabilities(found: dict[str, Any]) -> None:
    several = found["several"]
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]
    assert several[0]["text"] == several[1]["text"] != several[2]["text"] == several[3]["text"]
    assert [choice["tokens"] for choice in several] == [6] * 4


def test_a_named_tool_is_called_with_arguments_that_follow_its_schema(found: dict[str, Any]) -> None:
    (call,) = found["tool"]
    assert call["name"] == "weather"
    assert isinstance(call["arguments"]["city"], str)


def test_responses_whole_and_as_events(found: dict[str, Any]) -> None:
    assert found["response"]["status"] == "completed"
    assert found["response"]["text"]
    events = found["events"]
    assert events[0] == "response.created"
    assert events[-1] == "response.completed"
    assert "response.output_text.delta" in events


def test_errors_are_the_clients_own(found: dict[str, Any]) -> None:
    assert found["too_long"] == {"name": "BadRequestError", "status": 400, "code": "context_length_exceeded"}
    assert (found["no_model"]["name"], found["no_model"]["code"]) == ("NotFoundError", "model_not_found")
    assert found["wrong"]["name"] == "BadRequestError"
    assert MODEL in found["models"]
