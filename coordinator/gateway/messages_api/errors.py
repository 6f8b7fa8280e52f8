"""Errors in the shape that Anthropic's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from twinpool.errors import RequestError

PATH = "/v1/messages"
"""Where this shape holds, and below."""

_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def error_object(error: RequestError) -> dict[str, Any]:
    """The `error` field: what kind it is by the status, and the message."""
    other = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"type": _TYPES.get(error.status, other), "message": error.message}


def messages_error_json(error: RequestError, request_id: str | None) -> bytes:
    """The body of an error answer."""
    named = {} if request_id is None else {"request_id": request_id}
    return msgspec.json.encode({"type": "error", "error": error_object(error), **named})


def speaks_messages(path: str) -> bool:
    """Whether errors at `path` have this shape."""
    return path == PATH or path.startswith(f"{PATH}/")
