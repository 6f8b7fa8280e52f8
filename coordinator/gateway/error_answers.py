"""How what goes wrong is answered over HTTP: in the shape that the route's clients read, OpenAI's or Anthropic's, with
what a client needs to go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from twinpool.coordinator.gateway.messages_api.errors import messages_error_json, speaks_messages
from twinpool.coordinator.gateway.shapes import error_json
from twinpool.errors import BodyTooLarge, RequestError, RequestFailed, TryLater, Unauthorized

REQUEST_ID = "twinpool.request_id"
"""Where a request's scope holds the id that its client knows it by."""


class HttpError(RequestError):
    """A refusal of the HTTP layer itself: no such path, not with that method, a head that is none."""

    def __init__(self, message: str, status: int, kind: str = RequestError.kind) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def error_headers(error: RequestError) -> dict[str, str]:
    """The headers that this error adds to those of every answer."""
    match error:
        case TryLater(retry_after_s=wait_s):
            # Whole seconds for everybody; the openai client prefers the exact milliseconds.
            milliseconds = max(1, math.ceil(wait_s * 1000))
            return {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}
        case Unauthorized():
            return {"www-authenticate": "Bearer"}
        case BodyTooLarge() | HttpError(status=HTTPStatus.REQUEST_TIMEOUT):
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
    """Has `app` answer every exception in the shape of its route."""
    app.add_exception_handler(RequestError, _answer_request_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)


async def _answer_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope.get(REQUEST_ID), path=request.url.path)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    allowed = (error.headers or {}).get("Allow", "")
    match error.status_code:
        case 404:
            message = f"{where} is no route of this server; GET /docs lists them"
        case 405:
            message = f"{where} is not allowed; use {allowed}"
        case _:
            message = f"{where}: {error.detail}"
    failure = HttpError(message, error.status_code)
    return error_response(failure, headers=error.headers, path=request.url.path)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # the client left while sending its body: nothing reads this


async def _answer_bug(request: Request, error: Exception) -> Response:
    message = f"the server failed with {type(error).__name__}; this is a bug in Twinpool, see its log"
    return error_response(RequestFailed(message), request.scope.get(REQUEST_ID), path=request.url.path)
