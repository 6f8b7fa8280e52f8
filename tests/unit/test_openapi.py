"""The OpenAPI document against the application that it describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from support.gateway import MODEL, ScriptedService, in_process, tiny_tokenizer

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.key_ring import KeyRing, new_key
from twinpool.coordinator.gateway.routes import create_app
from twinpool.errors import RequestError

GENERATING = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
"""Routes that generate, and the field that each needs."""


def _app(*, keys: bool = False, **limits: Any) -> FastAPI:
    ring = KeyRing("", f"acme:{new_key()}") if keys else None
    return create_app(ScriptedService(), tiny_tokenizer(), MODEL, limits=GatewayConfig(**limits), keys=ring)


@pytest.fixture
def document() -> dict[str, Any]:
    return _app(keys=True).openapi()


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(ref := value.get("$ref"), str):
            yield ref
        for each in value.values():
            yield from _refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from _refs(each)


async def test_it_is_served_without_a_key() -> None:
    app = _app(keys=True)
    async with httpx.AsyncClient(transport=in_process(app), base_url="http://gateway") as client:
        served = (await client.get("/openapi.json")).json()
        assert served == app.openapi()
        assert "/openapi.json" in (await client.get("/docs")).text


def test_every_route_is_described_and_nothing_else() -> None:
    app = _app()
    mounted = {
        (route.path_format, method.lower())
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    described = {(path, method) for path, method, _ in _operations(app.openapi())}
    assert described == mounted
    assert {path for path, _ in described} >= GENERATING.keys()


def test_whatever_is_referred_to_is_there(document: dict[str, Any]) -> None:
    refs = set(_refs(document))
    assert len(refs) > 20
    for ref in refs:
        found = document
        for step in ref.removeprefix("#/").split("/"):
            found = found[step]
        assert found


def test_operations_have_names_of_their_own_and_sentences(document: dict[str, Any]) -> None:
    operations = [operation for *_, operation in _operations(document)]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)


def _kinds(error: type[RequestError]) -> Iterator[type[RequestError]]:
    yield error
    for kind in error.__subclasses__():
        yield from _kinds(kind)


def test_a_generation_may_be_answered_with_every_error_that_there_is(document: dict[str, Any]) -> None:
    statuses = {str(kind.status) for kind in _kinds(RequestError)} - {"403"}
    for path in GENERATING:
        responses = document["paths"][path]["post"]["responses"]
        assert statuses <= responses.keys()
        assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}


def test_no_route_validates_by_itself(document: dict[str, Any]) -> None:
    assert "422" not in {
        status for *_, operation in _operations(document) for status in operation["responses"]
    }


def test_bodies_are_the_structs_that_are_read(document: dict[str, Any]) -> None:
    for path, needed in GENERATING.items():
        body = document["paths"][path]["post"]["requestBody"]
        (ref,) = _refs(body)
        schema = document["components"]["schemas"][ref.rpartition("/")[2]]
        assert body["required"]
        assert schema["required"] == [needed]
        assert schema["properties"]["temperature"]


def test_who_needs_a_key_is_told(document: dict[str, Any]) -> None:
    for path, _, operation in _operations(document):
        needs_key = path not in ("/health", "/ready", "/version")
        assert bool(operation["security"]) == needs_key
        assert ("401" in operation["responses"]) == needs_key
    assert document["paths"]["/metrics"]["get"]["responses"]["403"]
    opened = _app(keys=True, metrics_open=True).openapi()["paths"]["/metrics"]["get"]
    assert (opened["security"], "401" in opened["responses"]) == ([], False)


def test_without_keys_nobody_needs_one() -> None:
    document = _app().openapi()
    assert "securitySchemes" not in document["components"]
    for *_, operation in _operations(document):
        assert "security" not in operation
        assert "401" not in operation["responses"]


def test_refusals_for_now_say_when_to_come_back(document: dict[str, Any]) -> None:
    responses = document["components"]["responses"]
    for status in ("429", "503"):
        assert "Retry-After" in responses[f"Error{status}"]["headers"]
