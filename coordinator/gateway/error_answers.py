"""How what goes wrong is answered over HTTP: in the shape that the route's clients read, OpenAI's or Anthropic's, with
what a client needs to go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from twinpool.coordinator.gateway.messages_api.errors import messages_error_json, speaks_messages
from twinpool.coordinator.gateway.methods import methods_of
from twinpool.coordinator.gateway.request_ids import fresh_id, is_sane
from twinpool.coordinator.gateway.shapes import error_json
from twinpool.errors import (
    BodyTooLarge,
    ClientTooSlow,
    DeadlineExceeded,
    DuplicateRequest,
    NoWorker,
    PoolRefused,
    RequestCancelled,
    RequestError,
    RequestFailed,
    TryLater,
    Unauthorized,
)

REQUEST_ID = "twinpool.request_id"
"""Where a request's scope holds the id that its client knows it by."""

NO_WORKER_S = 5
"""When to come back if a pool has no worker: one that was lost is there again in about so many seconds."""

_WITHOUT_PREFIX = ("/chat/", "/completions", "/responses", "/messages", "/models")
"""What clients ask for whose base URL lacks /v1."""


class HttpError(RequestError):
    """A refusal of the HTTP layer itself: no such path, not with that method, a head that is none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def error_headers(error: RequestError) -> dict[str, str]:
    """The headers that this error adds to those of every answer."""
    match error:
        case TryLater(retry_after_s=wait_s):
            # Whole seconds for everybody; the openai client prefers the exact milliseconds.
            milliseconds = max(1, math.ceil(wait_s * 1000))
            return {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}
        case NoWorker():
            return {"retry-after": str(NO_WORKER_S)}
        case Unauthorized():
            return {"www-authenticate": "Bearer"}
        case DeadlineExceeded() | DuplicateRequest() | PoolRefused() | ClientTooSlow() | RequestCancelled():
            # The clients of OpenAI and Anthropic would ask again, twice, because of the status.
            return {"x-should-retry": "false"}
        case (
            BodyTooLarge() | HttpError(status=HTTPStatus.REQUEST_TIMEOUT | HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        ):
            return {"connection": "close"}  # the rest is not read
        case _:
            return {}


def error_response(
    error: RequestError,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    path: str,
) -> Response:
    """The answer that tells of `error` at `path`; `headers` are added to the error's own."""
    response = Response(
        messages_error_json(error, request_id) if speaks_messages(path) else error_json(error),
        error.status,
        headers={**(headers or {}), **error_headers(error)},
        media_type="application/json",
    )
    if request_id is not None:
        response.headers["x-request-id"] = request_id
    return response


def add_error_handlers(app: FastAPI) -> None:
    """Has `app` answer what is raised on purpose in the shape of its route; `Manners` answers the rest."""
    app.add_exception_handler(RequestError, _answer_request_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)


async def _answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request_id_of(request.scope), path=request.url.path)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    scope = request.scope
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return no_such_route(scope)
        case HTTPStatus.METHOD_NOT_ALLOWED:
            headers = {"allow": ", ".join(methods_of(request.app.routes, scope))}
            message = f"{_asked(scope)} is not allowed; use {headers['allow']}"
        case _:
            headers = dict(error.headers or {})
            message = f"{_asked(scope)}: {error.detail}"
    failure = HttpError(message, error.status_code)
    return error_response(failure, request_id_of(scope), headers, path=scope["path"])


def no_such_route(scope: Scope) -> Response:
    """The answer where no route has the path."""
    where = "GET /openapi.json lists them, and GET /docs shows it in a browser"
    if scope["path"].startswith(_WITHOUT_PREFIX):
        where = f"most routes begin with /v1, so the client's base URL should end with it; {where}"
    message = f"{_asked(scope)} is no route of this server; {where}"
    return error_response(HttpError(message, HTTPStatus.NOT_FOUND), request_id_of(scope), path=scope["path"])


def bug_response(error: Exception, scope: Scope) -> Response:
    """The answer where something was raised that should not have been. Its words are not told."""
    message = f"the server failed with {type(error).__name__}; this is a bug in Twinpool, see its log"
    return error_response(RequestFailed(message), request_id_of(scope), path=scope["path"])


def request_id_of(scope: Scope) -> str | None:
    """What the answer calls its request: the id that it has got, or was sent with. Where errors say it in their body,
    as Anthropic's do, it is a new one rather than none."""
    given: str | None = scope.get(REQUEST_ID)
    if given is not None:
        return given
    sent = Headers(scope=scope).get("x-request-id")
    if sent is not None and is_sane(sent):
        return sent
    return fresh_id() if speaks_messages(scope["path"]) else None


def _asked(scope: Scope) -> str:
    return f"{scope['method']} {scope['path']}"


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # the client left while sending its body: nothing reads this
