"""The OpenAPI document: made of the routes as they are mounted, and of what each says of itself as an `Operation`.

Nothing here checks a request: what is checked are the bodies' structs, of which the document has the schemas.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPMethod
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.routing import Route

from twinpool.coordinator.gateway.admin_door import is_admin
from twinpool.coordinator.gateway.documented_answers import (
    ANSWERS,
    HEADERS,
    PARAMETERS,
    SCHEMAS,
    STATUSES,
    body_headers,
    generation_headers,
    headers_of,
    stream_schema,
)
from twinpool.coordinator.gateway.extensions import ExtensionFields
from twinpool.coordinator.gateway.field_descriptions import DESCRIPTIONS, EXTENSIONS, describe_fields
from twinpool.coordinator.gateway.front import METRICS_PATH, OPEN_PATHS
from twinpool.coordinator.gateway.messages_api.errors import speaks_messages

VERSION = "3.1.0"
_KEY = "twinpool"
_SCHEMAS = "#/components/schemas/"
_JSON = "application/json"
_OF_EVERY_ROUTE = (400, 408, 431, 500, 503)
"""What any request may get: it is no HTTP, comes too slowly, has too large a head, meets a bug, or one connection too
many."""
_OF_A_BODY = (404, 413, 415, 429)
_OF_A_GENERATION = (409, 499, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of a route beyond its path and its handler's docstring: the struct of its body, whether it
    `needs_body`, and whether it `generates`, so that it has an id, waits for workers and may be streamed."""

    body: type[msgspec.Struct] | None = None
    generates: bool = False
    needs_body: bool = True


def generation_schema(body: type[msgspec.Struct]) -> dict[str, Any]:
    """The `openapi_extra` of a route that generates from such a body."""
    return {_KEY: Operation(body, generates=True)}


def body_schema(body: type[msgspec.Struct], *, needs_body: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads such a body and answers at once."""
    return {_KEY: Operation(body, needs_body=needs_body)}


def describe(app: FastAPI, *, needs_key: bool, metrics_open: bool) -> None:
    """Has `app` serve this document of the routes that it has when it is first asked."""
    open_paths = OPEN_PATHS | {METRICS_PATH} if metrics_open else OPEN_PATHS

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, open_paths if needs_key else None)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents


def document(app: FastAPI, open_paths: Collection[str] | None) -> dict[str, Any]:
    """The document. `open_paths` need no key, all others do; None: no path does."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.include_in_schema]
    bodies = list(dict.fromkeys(body for route in routes if (body := _operation(route).body) is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS + "{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    _describe_fields(bodies, components)
    paths: dict[str, dict[str, Any]] = {}
    errors: dict[str, Any] = {}
    for route in routes:
        op, is_messages = _operation(route), speaks_messages(route.path)
        needs_key = open_paths is not None and route.path not in open_paths
        described = _described(route, op, schema_of, needs_key)
        for status in _statuses(route, op, needs_key):
            name = f"{'Messages' if is_messages else ''}Error{status}"
            errors[name] = _error(status, is_messages=is_messages)
            described["responses"].setdefault(str(status), {"$ref": f"#/components/responses/{name}"})
        if is_admin(route.path):
            described["security"] = [{name: []} for name in _ADMIN_KEY]
        elif open_paths is not None:
            described["security"] = [{name: []} for name in _KEYS] if needs_key else []
        for method in _methods(route):
            named = {"operationId": _name(method, route), **described}
            paths.setdefault(route.path_format, {})[method] = named
    made: dict[str, Any] = {
        "openapi": VERSION,
        "info": {"title": app.title, "version": app.version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": {**components, **SCHEMAS}, "responses": errors, "headers": HEADERS},
    }
    schemes = {} if open_paths is None else dict(_KEYS)
    if any(is_admin(route.path) for route in routes):
        schemes |= _ADMIN_KEY
    if schemes:
        made["components"]["securitySchemes"] = schemes
    return made


def _describe_fields(
    bodies: Iterable[type[msgspec.Struct]], components: Mapping[str, dict[str, Any]]
) -> None:
    for name, texts in DESCRIPTIONS.items():
        describe_fields(components[name], texts)
    for body in bodies:
        if issubclass(body, ExtensionFields):
            own = {field: EXTENSIONS[field] for field in ExtensionFields.__struct_fields__}
            describe_fields(components[body.__name__], own)


_KEYS: Mapping[str, Any] = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The ways to send a key; one is enough."""
_ADMIN_KEY: Mapping[str, Any] = {
    "admin-key": {
        "type": "http",
        "scheme": "bearer",
        "description": "The server's admin key; no tenant's does here.",
    }
}


def _name(method: str, route: Route) -> str:
    """Of an operation, as generated clients call it: ``post_v1_chat_completions``."""
    return re.sub(r"\W+", "_", f"{method}{route.path_format}").strip("_")


def _operation(route: Route) -> Operation:
    operation: Operation = (getattr(route, "openapi_extra", None) or {}).get(_KEY, Operation())
    return operation


def _methods(route: Route) -> list[str]:
    return sorted(method.lower() for method in route.methods or () if method != HTTPMethod.HEAD)


def _statuses(route: Route, op: Operation, needs_key: bool) -> list[int]:
    """Besides 200."""
    found = {*_OF_EVERY_ROUTE}
    if route.param_convertors:
        found.add(404)
    if op.body is not None:
        found.update(_OF_A_BODY)
    if op.generates:
        found.update(_OF_A_GENERATION)
    if is_admin(route.path):
        found.update((401, 403))
        if op.body is not None:
            found.add(409)
    elif needs_key:
        found.add(401)
        if route.path == METRICS_PATH:
            found.add(403)
    return sorted(found)


def _described(
    route: Route, op: Operation, schema_of: Mapping[Any, dict[str, Any]], needs_key: bool
) -> dict[str, Any]:
    text = inspect.getdoc(route.endpoint) or ""
    summary, _, rest = text.partition("\n\n")
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.param_convertors
    ]
    media, answer = ANSWERS.get(route.path_format, (_JSON, {"type": "object"}))
    content = {media: {"schema": answer}}
    described: dict[str, Any] = {"summary": " ".join(summary.split())}
    if rest:
        described["description"] = rest
    ok: dict[str, Any] = {"description": "Done.", "content": content, "headers": headers_of(200)}
    if op.generates:
        parameters += PARAMETERS
        content["text/event-stream"] = {"schema": stream_schema(route.path_format)}
        ok["description"] = "The answer: whole, or with `stream` as server-sent events."
        ok["headers"] = generation_headers(has_quotas=needs_key)
    if op.body is not None:
        ok["headers"] |= body_headers()
        described["requestBody"] = {
            "required": op.needs_body,
            "content": {_JSON: {"schema": schema_of[op.body]}},
        }
    return {**described, "parameters": parameters, "responses": {"200": ok, **_own_unavailable(route)}}


def _own_unavailable(route: Route) -> dict[str, Any]:
    """Probes say with 503 what is wrong, in the shape of their 200."""
    if route.path not in ("/health", "/ready"):
        return {}
    error = {"$ref": f"{_SCHEMAS}Error"}
    either = {"anyOf": [ANSWERS[route.path][1], error]}
    return {
        "503": {
            "description": "It is not.",
            "content": {_JSON: {"schema": either}},
            "headers": headers_of(503),
        }
    }


def _error(status: int, *, is_messages: bool) -> dict[str, Any]:
    schema = {"$ref": f"{_SCHEMAS}{'MessagesError' if is_messages else 'Error'}"}
    return {
        "description": STATUSES[status],
        "content": {_JSON: {"schema": schema}},
        "headers": headers_of(status),
    }
