"""litellm, which many gateways are built on, against a real server: as an OpenAI-compatible and as an Anthropic one."""

from __future__ import annotations

from typing import Any

import pytest
from support.clients import ANSWER, command, findings, needs
from support.server import Server

pytestmark = needs("litellm")


@pytest.fixture(scope="module")
def found(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What programs/litellm_client.py found."""
    folder = tmp_path_factory.mktemp("home")
    return findings(command("litellm", "python"), "litellm_client.py", server, folder)


def test_chats_and_completions(found: dict[str, Any]) -> None:
    assert found["whole"] == found["streamed"] == ANSWER
    assert found["finish"] == "stop"
    assert found["usage"][1] == len(found["scored"])
    assert found["completed"].startswith(" 5")
    assert all(logprob <= 0 for logprob in found["scored"])


def test_tools_and_structured_output(found: dict[str, Any]) -> None:
    ((name, arguments),) = found["tool"]
    assert name == "weather"
    assert isinstance(arguments["city"], str)
    assert isinstance(found["shaped"]["n"], int)


def test_the_route_of_anthropic(found: dict[str, Any]) -> None:
    assert found["message"] == found["message_streamed"] == ANSWER


def test_it_recognises_what_went_wrong(found: dict[str, Any]) -> None:
    """Routers that are built on it choose by these classes: another model for one that is too long, say."""
    assert found["too_long"] == "ContextWindowExceededError"
    assert found["no_model"] == "NotFoundError"
    assert found["embedding"] in ("BadRequestError", "NotFoundError")
