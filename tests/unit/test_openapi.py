"""The OpenAPI document against the application that it describes."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from support.gateway import MODEL, ScriptedService, events, in_process, says, tiny_tokenizer
from support.tool_answers import QWEN

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.answer_schemas import ANSWER_SCHEMAS
from twinpool.coordinator.gateway.bodies import ChatBody, CompletionBody
from twinpool.coordinator.gateway.field_descriptions import DESCRIPTIONS
from twinpool.coordinator.gateway.key_ring import KeyRing, new_key
from twinpool.coordinator.gateway.messages_api.body import MessagesBody
from twinpool.coordinator.gateway.responses.body import ResponsesBody
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.gateway.tokenizing import DetokenizeBody, TokenizeBody
from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.tokenizer import Tokenizer
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
        assert (await client.get("/docs")).status_code == 200


async def test_the_page_loads_nothing_from_elsewhere_and_runs_its_own_script_alone() -> None:
    app = _app()
    async with httpx.AsyncClient(transport=in_process(app), base_url="http://gateway") as client:
        answer = await client.get("/docs")
        assert (await client.head("/docs")).status_code == 200
    assert 'fetch("openapi.json")' in answer.text
    assert re.findall(r"https?:|\s(?:src|href)=\"(?!data:|openapi)", answer.text) == []
    policy = answer.headers["content-security-policy"]
    for element in ("style", "script"):
        (inside,) = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy


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


def test_every_field_of_the_openai_bodies_has_a_sentence(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    reached = ["ChatBody", "CompletionBody"]
    for name in reached:  # grows
        found = (ref.rpartition("/")[2] for ref in _refs(schemas[name]))
        reached += [each for each in dict.fromkeys(found) if each not in reached]
    assert set(reached) == DESCRIPTIONS.keys()
    for name in reached:
        assert DESCRIPTIONS[name].keys() == schemas[name]["properties"].keys()
        assert all(field["description"] for field in schemas[name]["properties"].values())
    assert schemas["MessagesBody"]["properties"]["seed"]["description"]


def test_schemas_of_answers_have_names_of_their_own() -> None:
    bodies = (ChatBody, CompletionBody, ResponsesBody, MessagesBody, TokenizeBody, DetokenizeBody)
    _, components = msgspec.json.schema_components(bodies)
    assert not components.keys() & ANSWER_SCHEMAS.keys()


_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "null": type(None), "array": list, "object": dict,
}  # fmt: skip


def _misfits(document: dict[str, Any], schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Where a value is not as its schema says, or has a field that the schema does not know."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        tried = [[*_misfits(document, each, value, path)] for each in schema["anyOf"]]
        yield from min(tried, key=len)
        return
    if "const" in schema or "enum" in schema:
        if value not in schema.get("enum", [schema.get("const")]):
            yield f"{path}: {value}"
        return
    if not isinstance(value, _TYPES[schema["type"]]):
        yield f"{path}: {value} is no {schema['type']}"
    elif isinstance(value, list):
        for each in value:
            yield from _misfits(document, schema["items"], each, f"{path}[]")
    elif isinstance(value, dict) and "properties" in schema:
        yield from (f"{path}.{name} is missing" for name in schema["required"] if name not in value)
        for name, each in value.items():
            if name in schema["properties"]:
                yield from _misfits(document, schema["properties"][name], each, f"{path}.{name}")
            else:
                yield f"{path}.{name} is not described"
    elif isinstance(value, dict) and "additionalProperties" in schema:
        for name, each in value.items():
            yield from _misfits(document, schema["additionalProperties"], each, f"{path}.{name}")


_CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
_WITH_TOOLS = {**_CHAT, "tools": [{"type": "function", "function": {"name": "weather"}}]}
_CALLING = '<think>Well.</think>So:<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
_WITH_IDS = {"return_token_ids": True, "twinpool": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", _CHAT),
        ("/v1/chat/completions", {**_CHAT, **_WITH_IDS, "n": 2}),
        (
            "/v1/chat/completions",
            {**_CHAT, **_WITH_IDS, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1},
        ),
        ("/v1/chat/completions", _WITH_TOOLS),
        ("/v1/completions", {"prompt": "Hi", "stop": "it"}),
        (
            "/v1/completions",
            {**_WITH_IDS, "prompt": ["Hi", "the"], "echo": True, "logprobs": 1, "prompt_logprobs": 1},
        ),
    ],
)
async def test_answers_are_as_the_document_says(path: str, body: dict[str, Any]) -> None:
    service = ScriptedService()
    service.script = says(_CALLING if "tools" in body else "the capital")
    plain = tiny_tokenizer()
    with_tools = Tokenizer(plain.backend, plain.eos_token_ids, ChatTemplate(QWEN, {}))
    app = create_app(service, with_tools if "tools" in body else plain, MODEL)
    document = app.openapi()
    ok = document["paths"][path]["post"]["responses"]["200"]["content"]
    streamed = {name: value for name, value in body.items() if name != "prompt_logprobs"}
    async with httpx.AsyncClient(transport=in_process(app), base_url="http://gateway") as client:
        whole = (await client.post(path, json=body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await client.post(path, json={**streamed, **options})).text)
    assert [*_misfits(document, ok["application/json"]["schema"], whole)] == []
    event = ok["text/event-stream"]["schema"]["x-event"]
    assert len(chunks) > 3
    assert ("tool_calls" in str(whole)) == ("reasoning_content" in str(chunks)) == ("tools" in body)
    for chunk in chunks[:-1]:
        assert [*_misfits(document, event, chunk)] == []


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
