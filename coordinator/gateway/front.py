"""The front door of the gateway: which tenant a request comes from, before anything else of it is looked at."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from twinpool.coordinator.gateway.admin_door import AdminDoor, is_admin
from twinpool.coordinator.gateway.error_answers import error_response, request_id_of
from twinpool.coordinator.gateway.key_ring import KeyRing
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import Forbidden, RequestError, Unauthorized
from twinpool.metrics import GatewayMetric

TENANT = "twinpool.tenant"
"""Where a request's scope holds its tenant."""
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/docs", "/openapi.json"})
"""What probes and people may ask without a key. It tells nothing of anybody's requests but whether they move."""
METRICS_PATH = "/metrics"


class FrontDoor:
    """An ASGI application around another one: lets a request in as a tenant's, or answers 401 or 403.

    Without keys everyone is `ANYONE`. With keys whatever is not in `OPEN_PATHS` needs one, an unknown path too, and
    `/metrics` one of a tenant that may read them (`metrics_open`: none). The operator's routes need `admin`'s key, and
    nothing else does.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing | None, admin: AdminDoor, meter: GatewayMeter, *, metrics_open: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin = admin
        self._meter = meter
        self._open_paths = OPEN_PATHS | {METRICS_PATH} if metrics_open else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope[TENANT] = self._tenant(scope)
        except RequestError as error:
            if isinstance(error, Unauthorized):
                self._meter.count(GatewayMetric.UNAUTHORIZED)
            await error_response(error, request_id_of(scope), path=scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant:
        path = scope["path"]
        if is_admin(path):
            self._admin.check(_authorization(Headers(scope=scope)))
            return ANYONE
        if self._keys is None or path in self._open_paths:
            return ANYONE
        tenant = self._keys.tenant(_authorization(Headers(scope=scope)))
        if path == METRICS_PATH and not tenant.read_metrics:
            raise Forbidden(
                f"tenant {tenant.name!r} may not read /metrics; set read_metrics = true in its [tenant.NAME], "
                "or serve with --metrics-open"
            )
        return tenant


def _authorization(headers: Headers) -> str | None:
    """The `Authorization` header; a key in `x-api-key`, where Anthropic's clients put it, counts as one."""
    if (authorization := headers.get("authorization")) is not None:
        return authorization
    key = headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"
