"""What `/openapi.json` says beyond what the routes' signatures do."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from twinpool.coordinator.gateway.bodies import GenerationBody
from twinpool.coordinator.gateway.front import OPEN_PATHS

_HEADERS = {
    "X-Request-Id": "Names the request: 1 to 128 letters, digits, '.', '_', ':' or '-'. One that a running request of "
    "yours has is refused with 409.",
    "X-Allow-Duplicate": "`true`: run it all the same, under the id with a suffix.",
    "X-Request-Timeout": "Seconds from now in which the answer must be complete; waiting counts. The smaller of this "
    "and the body's `timeout` holds.",
}
_ANSWERS = {
    "400": "A field has a wrong type or value; `error.param` names it.",
    "401": "The API key is missing or unknown.",
    "404": "The model is not served here.",
    "408": "The body came too slowly.",
    "409": "A request of yours with this id is running.",
    "413": "The body is too long.",
    "429": "Not now: `Retry-After` (seconds) and `retry-after-ms` say when.",
    "499": "Cancelled.",
    "503": "A pool has no worker.",
    "504": "Accepted, and not complete in time.",
}


def generation_schema(body: type[GenerationBody]) -> dict[str, Any]:
    """The OpenAPI entry of a route that generates from such a body."""
    _, components = msgspec.json.schema_components([body])
    definitions = {name: component for name, component in components.items() if name != body.__name__}
    schema = {**components[body.__name__], "$defs": definitions}
    return {
        "parameters": [
            {
                "name": name,
                "in": "header",
                "required": False,
                "description": text,
                "schema": {"type": "string"},
            }
            for name, text in _HEADERS.items()
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {status: {"description": text} for status, text in _ANSWERS.items()},
    }


def describe_keys(app: FastAPI) -> None:
    """Says which routes need an API key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema.setdefault("components", {})["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"}
            }
            for path, methods in schema["paths"].items():
                for method in methods.values():
                    method["security"] = [] if path in OPEN_PATHS else [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents
