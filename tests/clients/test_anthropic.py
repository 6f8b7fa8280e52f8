"""The `anthropic` package against `/v1/messages` of a real server."""

from __future__ import annotations

from typing import Any

import pytest
from support.clients import ANSWER, command, findings, needs
from support.server import Server

pytestmark = needs("anthropic")


@pytest.fixture(scope="module")
def found(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What programs/anthropic_client.py found."""
    folder = tmp_path_factory.mktemp("home")
    return findings(command("anthropic", "python"), "anthropic_client.py", server, folder)


def test_messages_whole_and_streamed_are_the_same(found: dict[str, Any]) -> None:
    assert found["whole"] == found["streamed"] == [ANSWER]
    assert found["stop_reason"] == found["streamed_stop_reason"] == "end_turn"
    assert found["usage"] == found["streamed_usage"]
    assert found["cut"] == "max_tokens"


def test_events_come_in_the_order_that_the_client_knows(found: dict[str, Any]) -> None:
    types = [kind for kind in found["types"] if kind not in ("text", "ping")]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[2:-3]) == {"content_block_delta"}


def test_errors_are_the_clients_own(found: dict[str, Any]) -> None:
    assert found["failures"] == {"no_model": ["NotFoundError", 404], "wrong": ["BadRequestError", 400]}
