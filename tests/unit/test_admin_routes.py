"""The operator's routes: their own key, their bodies, their words, and what the OpenAPI document says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support.gateway import MODEL, ScriptedService, error_of, in_process, tiny_tokenizer

from twinpool.config import GatewayConfig, Role
from twinpool.coordinator.gateway.key_ring import KeyRing, new_key
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.pool_desk import WAIT_S, Changes
from twinpool.coordinator.pool_plan import ChangeKind, PoolChange
from twinpool.errors import PoolRefused, UnknownWorker

ADMIN, TENANT = new_key(), new_key()
STATUS = {"ready": True, "reason": "all is well", "pools": {"prefill": 1, "decode": 1}, "workers": []}
ROUTES = ("/admin/pools", "/admin/workers/decode-1/drain", "/admin/workers/decode-1/role")


class ScriptedPools:
    """A `PoolService` that notes what it was asked, and answers `changes` or raises `error`."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.changes: Changes = ()
        self.error: Exception | None = None

    def pools(self) -> Mapping[str, Any]:
        return STATUS

    def set_pools(self, prefill: int | None, decode: int | None, wait_s: float) -> Changes:
        return self._take("set", prefill, decode, wait_s)

    def drain(self, worker_id: str, wait_s: float) -> Changes:
        return self._take("drain", worker_id, wait_s)

    def change_role(self, worker_id: str, role: Role, wait_s: float) -> Changes:
        return self._take("role", worker_id, role, wait_s)

    def _take(self, *asked: object) -> Changes:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return self.changes


def app(pools: ScriptedPools, admin_key: str = ADMIN) -> FastAPI:
    keys = KeyRing("", f"acme:{TENANT}")
    limits = GatewayConfig(admin_key=admin_key)
    return create_app(ScriptedService(), tiny_tokenizer(), MODEL, limits=limits, keys=keys, pools=pools)


@pytest.fixture(scope="module")
def pools() -> ScriptedPools:
    return ScriptedPools()


@pytest.fixture(scope="module")
def application(pools: ScriptedPools) -> FastAPI:
    return app(pools)


@pytest.fixture
def operator(application: FastAPI, pools: ScriptedPools) -> httpx.AsyncClient:
    pools.asked, pools.changes, pools.error = [], (), None
    return client_of(application, ADMIN)


def client_of(application: FastAPI, key: str | None) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=in_process(application), base_url="http://gateway", headers=headers)


@pytest.mark.parametrize(
    "key",
    [None, TENANT, ADMIN[:-1], ADMIN + "x", "x" * 1000],
    ids=["none", "a tenant's", "shorter", "longer", "another"],
)
async def test_nobody_else_gets_in(application: FastAPI, pools: ScriptedPools, key: str | None) -> None:
    pools.asked = []
    async with client_of(application, key) as client:
        for path in (*ROUTES, "/admin", "/admin/", "/admin/nowhere"):
            assert error_of(await client.post(path, json={}), 401)["code"] == "invalid_api_key"
        error_of(await client.get("/admin/pools"), 401)
    assert pools.asked == []


async def test_the_admin_key_is_no_tenants(operator: httpx.AsyncClient) -> None:
    async with operator:
        error_of(await operator.get("/v1/models"), 401)
        assert (await operator.get("/admin/pools")).json() == STATUS
        error_of(await operator.get("/admin/nowhere"), 404)


async def test_where_there_is_no_admin_key_nobody_gets_in_and_is_told_how() -> None:
    async with client_of(app(ScriptedPools(), ""), TENANT) as client:
        error = error_of(await client.get("/admin/pools"), 403)
    assert "--admin-key-file" in error["message"]


async def test_wishes_arrive_as_they_are_and_changes_are_told(
    operator: httpx.AsyncClient, pools: ScriptedPools
) -> None:
    pools.changes = (
        PoolChange(ChangeKind.ROLE, Role.DECODE, "prefill-1"),
        PoolChange(ChangeKind.START, Role.DECODE),
    )
    async with operator:
        response = await operator.post("/admin/pools", json={"prefill": 1, "decode": 3, "wait_s": 0})
        assert response.json() == STATUS | {
            "changes": [
                {"change": "role", "worker": "prefill-1", "role": "decode"},
                {"change": "start", "role": "decode"},
            ]
        }
        await operator.post("/admin/pools", json={"decode": 3})
        await operator.post("/admin/workers/decode-1/drain")
        await operator.post("/admin/workers/decode-1/role", json={"role": "prefill", "wait_s": 7.5})
    assert pools.asked == [
        ("set", 1, 3, 0.0),
        ("set", None, 3, WAIT_S),
        ("drain", "decode-1", WAIT_S),
        ("role", "decode-1", Role.PREFILL, 7.5),
    ]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (ROUTES[0], {}, "prefill and decode are both missing"),
        (ROUTES[0], {"prefill": 0}, "prefill is 0"),
        (ROUTES[0], {"prefill": 1.5}, "prefill is 1.5"),
        (
            ROUTES[0],
            {"prefil": 1},
            "prefil is no field of this route; its fields are prefill, decode, wait_s",
        ),
        (ROUTES[0], {"prefill": 1, "wait_s": -1}, "wait_s is -1"),
        (ROUTES[1], {"wait_s": "long"}, 'wait_s is "long"'),
        (ROUTES[2], {}, "role is missing"),
        (ROUTES[2], {"role": "colocated"}, "role is 'colocated'; allowed: prefill, decode"),
        (ROUTES[2], [], "the body is an empty list"),
    ],
)
async def test_a_body_that_is_wrong_is_refused_in_words(
    operator: httpx.AsyncClient, pools: ScriptedPools, path: str, body: object, told: str
) -> None:
    async with operator:
        assert told in error_of(await operator.post(path, json=body), 400)["message"]
    assert pools.asked == []


async def test_refusals_of_the_coordinator_keep_their_status(
    operator: httpx.AsyncClient, pools: ScriptedPools
) -> None:
    async with operator:
        pools.error = UnknownWorker("no worker 'x'")
        assert error_of(await operator.post("/admin/workers/x/drain"), 404)["code"] == "worker_not_found"
        pools.error = PoolRefused("it is the last")
        response = await operator.post("/admin/workers/x/drain")
        assert error_of(response, 409)["code"] == "pool_refused"
        assert response.headers["x-should-retry"] == "false"


def test_the_document_has_the_routes_their_key_and_their_answers(application: FastAPI) -> None:
    document = application.openapi()
    assert document["components"]["securitySchemes"].keys() == {"key", "x-api-key", "admin-key"}
    found = {path: methods for path, methods in document["paths"].items() if path.startswith("/admin")}
    assert found.keys() == {
        "/admin/pools",
        "/admin/workers/{worker_id}/drain",
        "/admin/workers/{worker_id}/role",
    }
    for methods in found.values():
        for method, operation in methods.items():
            assert operation["security"] == [{"admin-key": []}]
            assert {"200", "401", "403"} <= operation["responses"].keys()
            assert ("409" in operation["responses"]) == (method == "post")
            if method == "post":
                assert operation["requestBody"]["required"] == ("drain" not in operation["operationId"])
    schema = document["components"]["schemas"]["RoleBody"]["properties"]["role"]
    assert schema["enum"] == ["prefill", "decode"]


def test_a_server_without_pools_has_no_such_routes() -> None:
    bare = create_app(ScriptedService(), tiny_tokenizer(), MODEL)
    assert not [path for path in bare.openapi()["paths"] if path.startswith("/admin")]
