"""docs/api.md names every route, every code of an error, every field of every body, and every field that is refused: no
more and no less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.gateway import MODEL, ScriptedService, tiny_tokenizer

from twinpool.coordinator.gateway.bodies import ChatBody, ChatMessage, CompletionBody
from twinpool.coordinator.gateway.http_protocol import TooManyConnections
from twinpool.coordinator.gateway.messages_api.body import MessagesBody
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.gateway.structured import StructuredOutputs
from twinpool.errors import RequestError

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
NAMED = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`]*)`", TEXT))))
_TABLES_OF_FIELDS = re.compile(r"\| field \|.*?\n\|[-|]+\|\n((?:\|.*\n)+)")
_OF_EVERY_MESSAGE = {"role", "content"}


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody, ChatMessage])
def test_every_field_is_named(body: type[msgspec.Struct]) -> None:
    missing = {*body.__struct_fields__, *getattr(body, "not_supported", {})} - NAMED
    assert missing <= (_OF_EVERY_MESSAGE if body is ChatMessage else set())


def test_no_field_is_named_that_is_not_there() -> None:
    """What the tables' first column has in code marks is a field of one of the bodies, or one that is refused."""
    known = {"model", "reasoning_content"}
    for body in (ChatBody, CompletionBody, ChatMessage, StructuredOutputs):
        known |= {*body.__struct_fields__, *getattr(body, "not_supported", {})}
    first_cells = [
        row.split("|")[1] for table in _TABLES_OF_FIELDS.findall(TEXT) for row in table.strip().split("\n")
    ]
    fields = {name for cell in first_cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert len(fields) > 50
    assert fields <= known


def test_every_route_is_named() -> None:
    app = create_app(ScriptedService(), tiny_tokenizer(), MODEL)
    assert all(f"{path}" in TEXT for path in app.openapi()["paths"])


def _codes(error: type[RequestError]) -> Iterator[str]:
    if error.code is not None:
        yield error.code
    for kind in error.__subclasses__():
        yield from _codes(kind)


def test_every_errors_code_is_in_the_table() -> None:
    codes = set(_codes(RequestError))
    assert TooManyConnections.code in codes
    rows = TEXT[TEXT.index("| status | `code` | when |") :].split("\n\n")[0].split("\n")[2:]
    assert codes == {code for row in rows for code in re.findall(r"`(\w+)`", row.split("|")[2])}
