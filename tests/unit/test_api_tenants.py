"""Who is let in, what tenants learn of each other (nothing), cancelling, and ids that are used twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.gateway import (
    MODEL,
    SILENCE,
    ScriptedService,
    error_of,
    events,
    in_process,
    says,
    tiny_tokenizer,
)

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.cache_salts import CacheSalts
from twinpool.coordinator.gateway.key_ring import KeyRing, append_key, new_key
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.service import Output
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import QueueFull

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
THE = tuple(tiny_tokenizer().encode("the"))
KEYS = {name: new_key() for name in ("acme", "zeta", "watch")}


@pytest.fixture
async def guarded(service: ScriptedService, tmp_path_factory: pytest.TempPathFactory) -> httpx.ASGITransport:
    """A gateway that knows the tenants acme, zeta and watch; the last may read metrics."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("[tenant.watch]\nread_metrics = true\n")
    path.chmod(0o600)
    for tenant, key in KEYS.items():
        append_key(path, tenant, key)
    app = create_app(service, tiny_tokenizer(), MODEL, keys=KeyRing(str(path)))
    return in_process(app)


def as_tenant(transport: httpx.ASGITransport, name: str | None) -> httpx.AsyncClient:
    headers = {} if name is None else {"authorization": f"Bearer {KEYS[name]}"}
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)


@pytest.fixture
async def acme(guarded: httpx.ASGITransport) -> AsyncIterator[httpx.AsyncClient]:
    async with as_tenant(guarded, "acme") as client:
        yield client


@pytest.fixture
async def zeta(guarded: httpx.ASGITransport) -> AsyncIterator[httpx.AsyncClient]:
    async with as_tenant(guarded, "zeta") as client:
        yield client


async def running(
    client: httpx.AsyncClient, service: ScriptedService, request_id: str, **body: object
) -> asyncio.Task[httpx.Response]:
    """A request that has been submitted and gets no output."""
    service.script = lambda _: [SILENCE]
    before = len(service.submissions)
    posted = client.post(CHAT, json=HELLO | body, headers={"x-request-id": request_id})
    task = asyncio.create_task(posted)
    await service.until(lambda: len(service.submissions) > before)
    return task


async def cancel(client: httpx.AsyncClient, request_id: str) -> httpx.Response:
    return await client.post(f"/v1/requests/{request_id}/cancel")


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/requests/r/timeline", "/nowhere", "/redoc"])
@pytest.mark.parametrize("key", [None, "Bearer tp-wrong", "Basic abc"])
async def test_without_a_key_nothing_is_said(
    guarded: httpx.ASGITransport, path: str, key: str | None
) -> None:
    async with as_tenant(guarded, None) as client:
        response = await client.get(path, headers={} if key is None else {"authorization": key})
    error = error_of(response, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_a_request_without_a_key_is_refused_unread(
    guarded: httpx.ASGITransport, service: ScriptedService
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with as_tenant(guarded, None) as client:
        for path in (CHAT, "/v1/completions", "/v1/requests/r/cancel"):
            error_of(await client.post(path, content=endless()), 401)
    assert service.submissions == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/openapi.json"])
async def test_probes_need_no_key(guarded: httpx.ASGITransport, path: str) -> None:
    async with as_tenant(guarded, None) as client:
        assert (await client.get(path)).status_code == 200


async def test_metrics_are_for_tenants_that_may_read_them(
    guarded: httpx.ASGITransport, acme: httpx.AsyncClient
) -> None:
    assert error_of(await acme.get("/metrics"), 403)["code"] == "forbidden"
    async with as_tenant(guarded, "watch") as client:
        assert "twinpool_http_unauthorized_total" in (await client.get("/metrics")).text


async def test_metrics_can_be_open(service: ScriptedService) -> None:
    keys = KeyRing("", f"acme:{KEYS['acme']}")
    app = create_app(service, tiny_tokenizer(), MODEL, limits=GatewayConfig(metrics_open=True), keys=keys)
    async with as_tenant(in_process(app), None) as client:
        error_of(await client.get("/v1/models"), 401)
        assert "twinpool_http_unauthorized_total 1.0" in (await client.get("/metrics")).text


async def test_a_key_makes_a_request_its_tenants(acme: httpx.AsyncClient, service: ScriptedService) -> None:
    response = await acme.post(CHAT, json=HELLO, headers={"x-request-id": "r"})
    assert service.submission.tenant == Tenant("acme")
    assert service.submission.request_id != "r"
    assert response.headers["x-request-id"] == "r"
    assert response.json()["id"] == "chatcmpl-r"


async def test_the_schema_says_which_routes_need_a_key(acme: httpx.AsyncClient) -> None:
    paths = (await acme.get("/openapi.json")).json()["paths"]
    assert paths[CHAT]["post"]["security"] == [{"key": []}, {"x-api-key": []}]
    assert paths["/health"]["get"]["security"] == []


# ── tenants and each other ────────────────────────────────────────────────────────────────────────────────


async def test_another_tenants_request_is_as_unknown_as_one_that_never_was(
    acme: httpx.AsyncClient, zeta: httpx.AsyncClient, service: ScriptedService
) -> None:
    task = await running(acme, service, "theirs")
    answers = [
        (await zeta.get(f"/v1/requests/{name}/timeline"), await cancel(zeta, name))
        for name in ("theirs", "nobody", "chatcmpl-theirs", "acme:theirs")
    ]
    for pair in answers:
        assert {error_of(answer, 404)["code"] for answer in pair} == {"request_not_found"}
    theirs, nobody = (
        [answer.text.replace(name, "…") for answer in pair]
        for name, pair in zip(("theirs", "nobody"), answers, strict=False)
    )
    assert theirs == nobody
    timeline = (await acme.get("/v1/requests/theirs/timeline")).json()
    assert timeline["request_id"] == "theirs"
    await cancel(acme, "theirs")
    error_of(await task, 499)


async def test_tenants_may_use_the_same_id_at_once(
    acme: httpx.AsyncClient, zeta: httpx.AsyncClient, service: ScriptedService
) -> None:
    tasks = [await running(client, service, "r") for client in (acme, zeta)]
    assert (await cancel(zeta, "r")).status_code == 200
    assert error_of(await tasks[1], 499)["code"] == "cancelled"
    assert not tasks[0].done()
    await cancel(acme, "r")
    answer = await tasks[0]
    assert answer.headers["x-request-id"] == "r"


def test_salts_part_what_tenants_do_not_share() -> None:
    salts = CacheSalts()
    acme, zeta = Tenant("acme"), Tenant("zeta")
    open_, too = Tenant("open", shares_cache=True), Tenant("too", shares_cache=True)
    parted = [
        salts.salt(tenant, client_salt)
        for tenant in (acme, zeta, open_)
        for client_salt in ("", "x", "acme", "\ud800")
    ]
    assert len(set(parted)) == len(parted)
    assert salts.salt(acme, "x") == salts.salt(Tenant("acme", weight=2.0), "x")
    assert salts.salt(open_, "x") == salts.salt(too, "x")
    assert salts.salt(ANYONE, "") == ""
    assert salts.salt(ANYONE, "x") != "x"
    assert CacheSalts().salt(acme, "x") != salts.salt(acme, "x"), "nobody can compute another's salt"


# ── cancelling ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["r", "chatcmpl-r"])
async def test_a_cancelled_request_is_told_so(
    client: httpx.AsyncClient, service: ScriptedService, name: str
) -> None:
    task = await running(client, service, "r")
    answer = await cancel(client, name)
    assert answer.json() == {"request_id": "r", "was_running": True}
    error = error_of(await task, 499)
    assert (error["type"], error["code"]) == ("cancelled", "cancelled")
    assert (await cancel(client, "r")).json()["was_running"] is False


async def test_a_cancelled_stream_ends_with_an_event(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = lambda _: [Output(THE, 0), SILENCE]
    stream = client.post(CHAT, json=HELLO | {"stream": True}, headers={"x-request-id": "r"})
    task = asyncio.create_task(stream)
    await service.until(lambda: len(service.delivered_ids) == 1)
    assert (await cancel(client, "r")).status_code == 200
    *_, last = events((await task).text)
    assert last["error"]["code"] == "cancelled"
    assert "[DONE]" not in task.result().text


async def test_a_request_can_be_cancelled_before_its_body_has_come(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    is_reading, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        is_reading.set()
        await go_on.wait()
        yield b'{"prompt": "a"}'

    post = client.post("/v1/completions", content=slow(), headers={"x-request-id": "r"})
    task = asyncio.create_task(post)
    await is_reading.wait()
    assert (await cancel(client, "r")).json()["was_running"] is True
    go_on.set()
    error_of(await task, 499)
    assert service.submissions == []


@pytest.mark.parametrize("name", ["never", "chatcmpl-never", "cmpl-"])
async def test_cancelling_what_is_unknown_is_404(client: httpx.AsyncClient, name: str) -> None:
    assert error_of(await cancel(client, name), 404)["code"] == "request_not_found"


# ── the same id twice ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_repeated_id_starts_nothing_while_the_first_runs(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    task = await running(client, service, "r")
    repeated = await client.post(CHAT, json=HELLO, headers={"x-request-id": "r"})
    assert error_of(repeated, 409)["code"] == "duplicate_request"
    assert repeated.headers["x-request-id"] == "r"
    assert len(service.submissions) == 1
    service.script = says("Hello")
    headers = {"x-request-id": "r", "x-allow-duplicate": "true"}
    wanted = await client.post(CHAT, json=HELLO, headers=headers)
    assert wanted.status_code == 200
    assert wanted.headers["x-request-id"].startswith("r-")
    await cancel(client, "r")
    error_of(await task, 499)
    assert (await client.post(CHAT, json=HELLO, headers={"x-request-id": "r"})).status_code == 200


async def test_a_refused_request_frees_its_id(client: httpx.AsyncClient, service: ScriptedService) -> None:
    headers = {"x-request-id": "r"}
    for body in (
        b"{",
        b'{"messages": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9999}',
    ):
        error_of(await client.post(CHAT, content=body, headers=headers), 400)
    service.refusal = QueueFull("full", retry_after_s=1)
    error_of(await client.post(CHAT, json=HELLO, headers=headers), 429)
    service.refusal = None
    assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 200


# ── when ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("header", "field", "timeout_s"),
    [(None, None, None), ("2.5", None, 2.5), (None, 7, 7), ("9", 4.5, 4.5), ("3", 8, 3)],
)
async def test_the_nearer_deadline_holds(
    client: httpx.AsyncClient,
    service: ScriptedService,
    header: str | None,
    field: float | None,
    timeout_s: float | None,
) -> None:
    headers = {} if header is None else {"x-request-timeout": header}
    await client.post(CHAT, json=HELLO | {"timeout": field, "priority": -3}, headers=headers)
    deadline, received_at = service.submission.deadline, service.submission.received_at
    assert (None if deadline is None else deadline - received_at) == pytest.approx(timeout_s)
    assert service.submission.priority == -3


@pytest.mark.parametrize("header", ["", "soon", "0", "-1", "nan", "inf", "1" * 400])
async def test_a_timeout_header_that_is_none_is_refused(client: httpx.AsyncClient, header: str) -> None:
    response = await client.post(CHAT, json=HELLO, headers={"x-request-timeout": header})
    assert error_of(response, 400)["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("field", [{"timeout": 0}, {"timeout": "1"}, {"priority": 1001}, {"priority": 0.5}])
async def test_a_timeout_or_priority_out_of_range_is_refused(
    client: httpx.AsyncClient, field: dict[str, object]
) -> None:
    error = error_of(await client.post(CHAT, json=HELLO | field), 400)
    assert error["param"] == next(iter(field))


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"), [(0.0, 1, 1), (0.25, 1, 250), (1.0, 1, 1000), (2.0001, 3, 2001)]
)
async def test_a_client_is_told_when_to_come_back(
    client: httpx.AsyncClient, service: ScriptedService, wait_s: float, seconds: int, milliseconds: int
) -> None:
    service.refusal = QueueFull("full", retry_after_s=wait_s)
    headers = (await client.post(CHAT, json=HELLO)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == (str(seconds), str(milliseconds))
