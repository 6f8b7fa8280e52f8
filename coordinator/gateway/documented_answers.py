"""What the OpenAPI document says of answers: their shapes, statuses and headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.coordinator.gateway.answer_schemas import (
    ANSWER_SCHEMAS,
    NUMBER,
    STRING,
    WHOLE,
    object_of,
    or_null,
    schema_ref,
)

_LIST = {"type": "array"}
_CARD = object_of(
    id=STRING, object={"const": "model"}, created=WHOLE, owned_by=STRING, max_model_len=or_null(WHOLE)
)
_POOLS = object_of(ready={"type": "boolean"}, reason=STRING, pools={"type": "object"}, workers=_LIST)

ANSWERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    path: ("application/json", schema)
    for path, schema in {
        "/v1/chat/completions": schema_ref("ChatCompletion"),
        "/v1/completions": schema_ref("TextCompletion"),
        "/v1/responses": object_of(
            id=STRING, object={"const": "response"}, created_at=NUMBER, status=STRING, model=STRING, output=_LIST
        ),
        "/v1/responses/input_tokens": object_of(object=STRING, input_tokens=WHOLE),
        "/v1/messages": object_of(
            id=STRING, type={"const": "message"}, role={"const": "assistant"}, model=STRING, content=_LIST,
            stop_reason=or_null(STRING), usage={"type": "object"},
        ),
        "/v1/messages/count_tokens": object_of(input_tokens=WHOLE),
        "/tokenize": object_of(count=WHOLE, max_model_len=or_null(WHOLE), tokens=_LIST),
        "/detokenize": object_of(prompt=STRING),
        "/v1/models": object_of(object={"const": "list"}, data={"type": "array", "items": _CARD}),
        "/v1/models/{name}": _CARD,
        "/v1/requests/{request_id}/timeline": object_of(request_id=STRING),
        "/v1/requests/{request_id}/cancel": object_of(request_id=STRING, was_running={"type": "boolean"}),
        "/admin/pools": _POOLS,
        "/admin/workers/{worker_id}/drain": _POOLS,
        "/admin/workers/{worker_id}/role": _POOLS,
        "/health": object_of(status=STRING, reason=STRING),
        "/ready": object_of(ready={"type": "boolean"}, reason=STRING),
        "/version": object_of(version=STRING),
    }.items()
} | {"/metrics": ("text/plain", STRING)}  # fmt: skip
"""The media type and the schema of a path's 200: fields that are always there."""
_CHUNKS = {"/v1/chat/completions": "ChatCompletionChunk", "/v1/completions": "TextCompletionChunk"}


def stream_schema(path: str) -> dict[str, Any]:
    """What a stream of the route `path` is. `x-event` is the schema of its events, where the document has one."""
    text = "Server-sent events; each `data` is a JSON object, the last may be `[DONE]`."
    event = {"x-event": schema_ref(_CHUNKS[path])} if path in _CHUNKS else {}
    return {"type": "string", "description": text, **event}


SCHEMAS: Mapping[str, Any] = {
    **ANSWER_SCHEMAS,
    "Error": object_of(
        error=object_of(message=STRING, type=STRING, param=or_null(STRING), code=or_null(STRING))
    ),
    "MessagesError": object_of(type={"const": "error"}, error=object_of(type=STRING, message=STRING)),
}

STATUSES: Mapping[int, str] = {
    400: "A field has a wrong type or value, which `error.param` names; or the request is no HTTP.",
    401: "The API key is missing or unknown.",
    403: "The API key's tenant may not read this; or the server has no admin key.",
    404: "No such model, or no such request of yours.",
    408: "The request came too slowly, or its client does not take the answer.",
    409: "A request of yours with this id is running; or the pools cannot be what is wanted of them.",
    413: "The body is too long.",
    415: "The body is no JSON by what the request says of it: a form, or compressed.",
    429: "Not now: quota, queue, or a deadline that would be missed. `Retry-After` says when.",
    431: "The request's head is too large.",
    499: "Cancelled.",
    500: "The request was lost, or met a bug.",
    503: "A pool has no worker, or all connections are in use.",
    504: "Accepted, and not complete in time.",
}


def _header(description: str, schema: Mapping[str, Any] = STRING) -> dict[str, Any]:
    return {"description": description, "schema": schema}


_QUOTA_HEADERS: Mapping[str, dict[str, Any]] = {
    f"X-RateLimit-{what}-{unit}": _header(text.format(unit=unit.lower()), schema)
    for unit in ("Requests", "Tokens")
    for what, text, schema in (
        ("Limit", "{unit} per minute of the tenant's quota, where it has one.", WHOLE),
        ("Remaining", "What is left of them.", WHOLE),
        ("Reset", "When all of them are there again, like 120ms, 1s or 6m0s.", STRING),
    )
}
HEADERS: Mapping[str, dict[str, Any]] = {
    "X-Request-Id": _header("The request's id: the one that was sent, or else one of ours."),
    "X-Twinpool-Warning": _header("Fields that were ignored."),
    "Retry-After": _header("Seconds.", WHOLE),
    "Retry-After-Ms": _header("The same in milliseconds.", WHOLE),
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
    """The headers that an answer with this status may have."""
    return _referred("X-Request-Id", *_OF_STATUS.get(status, ()))


def generation_headers(*, has_quotas: bool) -> dict[str, Any]:
    """The headers that the answer of a route that generates may have."""
    quotas = _QUOTA_HEADERS if has_quotas else ()
    return _referred("X-Request-Id", *quotas)


def body_headers() -> dict[str, Any]:
    """The headers that the answer of a route that reads a body may have besides."""
    return _referred("X-Twinpool-Warning")


def _referred(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


PARAMETERS: Sequence[dict[str, Any]] = [
    {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
    for name, text, schema in (
        (
            "X-Request-Id",
            "Names the request: 1 to 128 letters, digits, '.', '_', ':' or '-'; another one is replaced. One that a "
            "running request of yours has is refused with 409.",
            STRING,
        ),
        ("X-Allow-Duplicate", "`true`: run it all the same, under the id with a suffix.", STRING),
        (
            "X-Request-Timeout",
            "Seconds from now in which the answer must be complete; waiting counts. The smaller of this and the body's "
            "`timeout` holds.",
            {"type": "number", "exclusiveMinimum": 0},
        ),
        ("X-Twinpool-Usage", "`1`: the usage has a block `twinpool`, as the body's field asks for.", STRING),
    )
]
"""Of routes that generate."""
