"""The operator's routes: who is in the pools, and changes of that. They have a key of their own, no tenant's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from twinpool.config import MOST_WORKERS, Role
from twinpool.coordinator.gateway.admin_door import ADMIN_PREFIX
from twinpool.coordinator.gateway.bodies import check_body, read_object
from twinpool.coordinator.gateway.docs import body_schema
from twinpool.coordinator.gateway.generation import Generator
from twinpool.coordinator.gateway.shapes import to_json
from twinpool.coordinator.gateway.tokenizing import read_request
from twinpool.coordinator.pool_desk import WAIT_S, Changes, PoolService
from twinpool.errors import InvalidRequest

MOST_WAIT_S = 3600.0
_ROLES = (Role.PREFILL, Role.DECODE)

_Count = Annotated[
    int, msgspec.Meta(ge=1, le=MOST_WORKERS, description="That many; left out: as many as now.")
]
_Wait = Annotated[
    float,
    msgspec.Meta(
        ge=0,
        le=MOST_WAIT_S,
        description="Seconds in which what runs on workers that go may end; what is left then goes on elsewhere.",
    ),
]


class PoolsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /admin/pools`."""

    prefill: _Count | None = None
    decode: _Count | None = None
    wait_s: _Wait | None = None


class DrainBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /admin/workers/{worker_id}/drain`; it may be empty."""

    wait_s: _Wait | None = None


class RoleBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /admin/workers/{worker_id}/role`."""

    role: Annotated[str, msgspec.Meta(description="The new one.", extra_json_schema={"enum": [*_ROLES]})]
    wait_s: _Wait | None = None


Body = TypeVar("Body", PoolsBody, DrainBody, RoleBody)


class Admin:
    """The routes. `generator` reads their bodies."""

    def __init__(self, pools: PoolService, generator: Generator) -> None:
        self._pools = pools
        self._generator = generator

    def mount(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        pools, worker = f"{ADMIN_PREFIX}pools", f"{ADMIN_PREFIX}workers/{{worker_id}}"
        app.add_api_route(pools, self.pools, methods=["GET"])
        for path, handler, body in (
            (pools, self.set_pools, PoolsBody),
            (f"{worker}/drain", self.drain, DrainBody),
            (f"{worker}/role", self.change_role, RoleBody),
        ):
            described = body_schema(body, needs_body=body is not DrainBody)
            app.add_api_route(path, handler, methods=["POST"], openapi_extra=described)

    async def pools(self) -> Response:
        """Every worker: its role, what it is doing, what it holds, its links."""
        return _json(self._pools.pools())

    async def set_pools(self, request: Request) -> Response:
        """Goes for so many prefill and decode workers: roles change where that helps both pools, the rest is started or
        drained. The answer tells what has been begun; `GET` shows how far it is."""
        body = await self._read(request, PoolsBody)
        if body.prefill is None and body.decode is None:
            raise InvalidRequest(
                "prefill and decode are both missing; give one of them at least", param="prefill"
            )
        return self._begun(self._pools.set_pools(body.prefill, body.decode, _wait_s(body)))

    async def drain(self, request: Request, worker_id: str) -> Response:
        """Ends a worker: it gets nothing new, what runs there ends or goes on elsewhere, then it stops, and is not
        started again."""
        body = await self._read(request, DrainBody)
        return self._begun(self._pools.drain(worker_id, _wait_s(body)))

    async def change_role(self, request: Request, worker_id: str) -> Response:
        """Gives a worker the other role, without a restart: what runs there ends or goes on elsewhere, and the worker
        keeps its model and its prefix cache."""
        body = await self._read(request, RoleBody)
        if body.role not in _ROLES:
            raise InvalidRequest(f"role is {body.role!r}; allowed: {', '.join(_ROLES)}", param="role")
        return self._begun(self._pools.change_role(worker_id, Role(body.role), _wait_s(body)))

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        return await read_request(self._generator, request, lambda data: _parse(data, kind))

    def _begun(self, changes: Changes) -> Response:
        return _json({"changes": [change.as_json() for change in changes], **self._pools.pools()})


def _parse(data: bytes, kind: type[Body]) -> Body:
    """Fields that nobody has heard of are refused: an operator who mistypes one must not get something else."""
    raw = read_object(data or b"{}")
    if unknown := raw.keys() - set(kind.__struct_fields__):
        name, fields = min(unknown), ", ".join(kind.__struct_fields__)
        raise InvalidRequest(f"{name} is no field of this route; its fields are {fields}", param=name)
    return check_body(raw, kind)


def _wait_s(body: PoolsBody | DrainBody | RoleBody) -> float:
    return WAIT_S if body.wait_s is None else body.wait_s


def _json(value: Mapping[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")
