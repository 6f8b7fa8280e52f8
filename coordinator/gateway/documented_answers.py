"""What the OpenAPI document says of answers: their shapes, statuses and headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_STRING, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def _object(**properties: Any) -> dict[str, Any]:
    """An object with at least these fields."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_ANY: dict[str, Any] = {}
_LIST = {"type": "array"}
_CARD = _object(
    id=_STRING, object={"const": "model"}, created=_WHOLE, owned_by=_STRING, max_model_len=_or_null(_WHOLE)
)
_USAGE = _object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE)

ANSWERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    path: ("application/json", schema)
    for path, schema in {
        "/v1/chat/completions": _object(
            id=_STRING, object={"const": "chat.completion"}, created=_WHOLE, model=_STRING, choices=_LIST, usage=_USAGE
        ),
        "/v1/completions": _object(
            id=_STRING, object={"const": "text_completion"}, created=_WHOLE, model=_STRING, choices=_LIST, usage=_USAGE
        ),
        "/v1/responses": _object(
            id=_STRING, object={"const": "response"}, created_at=_NUMBER, status=_STRING, model=_STRING, output=_LIST
        ),
        "/v1/responses/input_tokens": _object(object=_STRING, input_tokens=_WHOLE),
        "/v1/messages": _object(
            id=_STRING, type={"const": "message"}, role={"const": "assistant"}, model=_STRING, content=_LIST,
            stop_reason=_or_null(_STRING), usage={"type": "object"},
        ),
        "/v1/messages/count_tokens": _object(input_tokens=_WHOLE),
        "/tokenize": _object(count=_WHOLE, max_model_len=_or_null(_WHOLE), tokens=_LIST),
        "/detokenize": _object(prompt=_STRING),
        "/v1/models": _object(object={"const": "list"}, data={"type": "array", "items": _CARD}),
        "/v1/models/{name}": _CARD,
        "/v1/requests/{request_id}/timeline": _object(request_id=_STRING),
        "/v1/requests/{request_id}/cancel": _object(request_id=_STRING, was_running={"type": "boolean"}),
        "/health": _object(status=_STRING, reason=_STRING),
        "/ready": _object(ready={"type": "boolean"}, reason=_STRING),
        "/version": _object(version=_STRING),
    }.items()
} | {"/metrics": ("text/plain", _STRING)}  # fmt: skip
"""The media type and the schema of a path's 200: fields that are always there."""
STREAM = {
    "type": "string",
    "description": "Server-sent events; each `data` is a JSON object, the last may be `[DONE]`.",
}

SCHEMAS: Mapping[str, Any] = {
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_or_null(_STRING), code=_or_null(_STRING))
    ),
    "MessagesError": _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING)),
}

STATUSES: Mapping[int, str] = {
    400: "A field has a wrong type or value, which `error.param` names; or the request is no HTTP.",
    401: "The API key is missing or unknown.",
    403: "The API key's tenant may not read this.",
    404: "No such model, or no such request of yours.",
    408: "The request came too slowly, or its client does not take the answer.",
    409: "A request of yours with this id is running.",
    413: "The body is too long.",
    429: "Not now: quota, queue, or a deadline that would be missed. `Retry-After` says when.",
    431: "The request's head is too large.",
    499: "Cancelled.",
    500: "The request was lost, or met a bug.",
    503: "A pool has no worker, or all connections are in use.",
    504: "Accepted, and not complete in time.",
}


def _header(description: str, schema: Mapping[str, Any] = _STRING) -> dict[str, Any]:
    return {"description": description, "schema": schema}


_QUOTA_HEADERS: Mapping[str, dict[str, Any]] = {
    f"X-RateLimit-{what}-{unit}": _header(text.format(unit=unit.lower()), schema)
    for unit in ("Requests", "Tokens")
    for what, text, schema in (
        ("Limit", "{unit} per minute of the tenant's quota, where it has one.", _WHOLE),
        ("Remaining", "What is left of them.", _WHOLE),
        ("Reset", "When all of them are there again, like 120ms, 1s or 6m0s.", _STRING),
    )
}
HEADERS: Mapping[str, dict[str, Any]] = {
    "X-Request-Id": _header("The request's id: the one that was sent, or else one of ours."),
    "X-Twinpool-Warning": _header("Fields that were ignored."),
    "Retry-After": _header("Seconds.", _WHOLE),
    "Retry-After-Ms": _header("The same in milliseconds.", _WHOLE),
    "X-Should-Retry": _header("`false`: the same request again cannot help."),
    "WWW-Authenticate": _header("Bearer."),
    **_QUOTA_HEADERS,
}
_OF_STATUS: Mapping[int, Sequence[str]] = {
    401: ("WWW-Authenticate",),
    408: ("X-Should-Retry",),
    409: ("X-Should-Retry",),
    429: ("Retry-After", "Retry-After-Ms", *_QUOTA_HEADERS),
    499: ("X-Should-Retry",),
    503: ("Retry-After", "Retry-After-Ms"),
    504: ("X-Should-Retry",),
}


def headers_of(status: int) -> dict[str, Any]:
    """Those that an answer with this status may have."""
    return _referred("X-Request-Id", *_OF_STATUS.get(status, ()))


def generation_headers(*, has_quotas: bool) -> dict[str, Any]:
    """Those that the answer of a route that generates may have."""
    quotas = _QUOTA_HEADERS if has_quotas else ()
    return _referred("X-Request-Id", "X-Twinpool-Warning", *quotas)


def _referred(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


PARAMETERS: Sequence[dict[str, Any]] = [
    {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
    for name, text, schema in (
        (
            "X-Request-Id",
            "Names the request: 1 to 128 letters, digits, '.', '_', ':' or '-'; another one is replaced. One that a "
            "running request of yours has is refused with 409.",
            _STRING,
        ),
        ("X-Allow-Duplicate", "`true`: run it all the same, under the id with a suffix.", _STRING),
        (
            "X-Request-Timeout",
            "Seconds from now in which the answer must be complete; waiting counts. The smaller of this and the body's "
            "`timeout` holds.",
            {"type": "number", "exclusiveMinimum": 0},
        ),
        ("X-Twinpool-Usage", "`1`: the usage has a block `twinpool`, as the body's field asks for.", _STRING),
    )
]
"""Of routes that generate."""
