"""What every answer has, whatever its route; and OPTIONS, which asks about a path and not for what lies behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinpool.coordinator.gateway.cors import CrossOrigin
from twinpool.coordinator.gateway.error_answers import REQUEST_ID, bug_response, no_such_route
from twinpool.coordinator.gateway.front import TENANT
from twinpool.coordinator.gateway.methods import OPTIONS, methods_of
from twinpool.coordinator.gateway.rate_limits import rate_limit_headers
from twinpool.coordinator.gateway.request_ids import is_sane
from twinpool.coordinator.tenants import Allowances, Tenant

_REQUEST_ID_HEADER = "x-request-id"


class Manners:
    """An ASGI application around all others. It answers OPTIONS, without a key, and adds to every answer, errors too:

    - what a browser must be told (`CrossOrigin`);
    - the `X-Request-Id` that came, unless the answer has its own;
    - to a request that has got an id of ours (`REQUEST_ID`), so to each that generates: what is left of its tenant's
      quotas.

    `routes` are those of the application inside, `allowances` says what is left.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        origins: Collection[str],
        allowances: Callable[[Tenant], Allowances],
    ) -> None:
        self._app = app
        self._routes = routes
        self._cross_origin = CrossOrigin(origins)
        self._allowances = allowances

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. What is raised has been answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        has_started = False

        async def send_politely(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *self._added(scope, asked, message)]
            await send(message)

        if scope["method"] == OPTIONS:
            await self._options(scope, asked)(scope, receive, send_politely)
            return
        try:
            await self._app(scope, receive, send_politely)
        except Exception as error:
            if not has_started:
                await bug_response(error, scope)(scope, receive, send_politely)
            raise

    def _options(self, scope: Scope, asked: Headers) -> Response:
        methods = methods_of(self._routes, scope)
        if not methods:
            return no_such_route(scope)
        headers = {"allow": ", ".join(methods), **self._cross_origin.preflight(asked, methods)}
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)

    def _added(self, scope: Scope, asked: Headers, message: Message) -> list[tuple[bytes, bytes]]:
        added = self._cross_origin.headers(asked.get("origin"))
        wanted = asked.get(_REQUEST_ID_HEADER)
        names = {name for name, _ in message.get("headers", ())}
        if wanted is not None and _REQUEST_ID_HEADER.encode() not in names and is_sane(wanted):
            added[_REQUEST_ID_HEADER] = wanted
        if REQUEST_ID in scope:
            added |= rate_limit_headers(self._allowances(scope[TENANT]))
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in added.items()]
