"""What every answer has whatever its route: CORS, methods, the request's id, what is left of quotas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from support.gateway import MODEL, ScriptedService, error_of, in_process, tiny_tokenizer

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.cors import CrossOrigin
from twinpool.coordinator.gateway.key_ring import KeyRing, new_key
from twinpool.coordinator.gateway.rate_limits import duration
from twinpool.coordinator.gateway.routes import create_app
from twinpool.coordinator.tenants import Allowance, Allowances
from twinpool.errors import ConfigError, InvariantViolation, QueueFull

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
KEY = new_key()
PAGE = "https://app.example.com"
FROM_PAGE = {"origin": PAGE}
PREFLIGHT = {
    **FROM_PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def _app(service: ScriptedService, *, keys: bool = True, **limits: Any) -> FastAPI:
    ring = KeyRing("", f"acme:{KEY}") if keys else None
    return create_app(service, tiny_tokenizer(), MODEL, limits=GatewayConfig(**limits), keys=ring)


def _client(app: FastAPI, *, key: bool = True) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {KEY}"} if key else {}
    return httpx.AsyncClient(transport=in_process(app), base_url="http://gateway", headers=headers)


@pytest.fixture
async def page(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a key, of a server that pages of `PAGE` may use."""
    async with _client(_app(service, cors_origins=(PAGE, "http://localhost:3000"))) as client:
        yield client


def _paths(app: FastAPI, method: str) -> list[str]:
    """The paths of all documented routes with this method, parameters filled in."""
    return [
        route.path_format.format(**dict.fromkeys(route.param_convertors, MODEL))
        for route in app.routes
        if isinstance(route, APIRoute) and method in route.methods and route.include_in_schema
    ]


# ── pages of other origins ────────────────────────────────────────────────────────────────────────────────


async def test_without_origins_no_answer_speaks_of_them(client: httpx.AsyncClient) -> None:
    for answer in (
        await client.post(CHAT, json=HELLO, headers=FROM_PAGE),
        await client.get("/health", headers=FROM_PAGE),
        await client.options(CHAT, headers=PREFLIGHT),
    ):
        assert answer.is_success
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


async def test_a_page_may_ask_of_every_route_beforehand_and_needs_no_key(service: ScriptedService) -> None:
    app = _app(service, cors_origins=(PAGE,))
    async with _client(app, key=False) as client:
        for path in {*_paths(app, "GET"), *_paths(app, "POST")}:
            answer = await client.options(path, headers=PREFLIGHT)
            assert (answer.status_code, answer.content) == (204, b"")
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert (
                answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
            )
            assert answer.headers["access-control-allow-methods"] == answer.headers["allow"]
            assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_may_read_answers_and_their_headers(page: httpx.AsyncClient, stream: bool) -> None:
    answer = await page.post(CHAT, json=HELLO | {"stream": stream}, headers=FROM_PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


async def test_a_page_may_read_why_it_was_refused(page: httpx.AsyncClient, service: ScriptedService) -> None:
    service.refusal = InvariantViolation("two owners")
    for answer, status in (
        (await page.get("/nowhere", headers=FROM_PAGE), 404),
        (await page.get(CHAT, headers=FROM_PAGE), 405),
        (await page.post(CHAT, content=b"{", headers=FROM_PAGE), 400),
        (await page.post(CHAT, json=HELLO, headers=FROM_PAGE), 500),
        (await page.get("/v1/models", headers={**FROM_PAGE, "authorization": "Bearer no"}), 401),
    ):
        error_of(answer, status)
        assert answer.headers["access-control-allow-origin"] == PAGE


async def test_other_pages_are_told_nothing(page: httpx.AsyncClient) -> None:
    other = {**PREFLIGHT, "origin": "https://evil.example.com"}
    for answer in (await page.options(CHAT, headers=other), await page.post(CHAT, json=HELLO, headers=other)):
        assert answer.is_success
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["vary"] == "Origin", "nor is a page told what a cache kept of another's answer"


def test_with_a_star_everybody_may_and_caches_may_keep_it() -> None:
    everybody = CrossOrigin(("*",))
    for origin in (None, "null", PAGE):
        headers = everybody.headers(origin)
        assert headers["access-control-allow-origin"] == "*"
        assert "vary" not in headers


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "https://a b", "", "**"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        GatewayConfig(cors_origins=(origin,))


# ── methods ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (CHAT, "OPTIONS, POST"),
        ("/health", "GET, HEAD, OPTIONS"),
        (f"/v1/models/{MODEL}", "GET, HEAD, OPTIONS"),
        ("/v1/requests/r/cancel", "OPTIONS, POST"),
        ("/v1/responses/input_tokens", "OPTIONS, POST"),
    ],
)
async def test_options_tells_the_methods_of_a_path_and_405_does_too(
    client: httpx.AsyncClient, path: str, allowed: str
) -> None:
    answer = await client.options(path)
    assert (answer.status_code, answer.content, answer.headers["allow"]) == (204, b"", allowed)
    refused = await client.request("PATCH", path)
    assert refused.headers["allow"] == allowed
    assert allowed in error_of(refused, 405)["message"]


async def test_a_path_has_its_own_methods_and_not_those_of_one_with_a_parameter(
    client: httpx.AsyncClient,
) -> None:
    refused = await client.get("/v1/responses/input_tokens")
    error_of(refused, 405)
    assert refused.headers["allow"] == "OPTIONS, POST"
    assert error_of(await client.get("/v1/responses/resp_1"), 404)["code"] == "not_stored"


async def test_options_of_nowhere_is_404(client: httpx.AsyncClient) -> None:
    assert "/nowhere" in error_of(await client.options("/nowhere"), 404)["message"]


async def test_whatever_can_be_got_has_a_head(service: ScriptedService) -> None:
    app = _app(service, keys=False)
    async with _client(app) as client:
        paths = [path for path in _paths(app, "GET") if "timeline" not in path]
        assert len(paths) >= 6
        for path in paths:
            answer = await client.head(path)
            assert answer.status_code == 200, path


# ── the request's id ──────────────────────────────────────────────────────────────────────────────────────


async def test_the_id_of_a_request_comes_back_with_every_answer(service: ScriptedService) -> None:
    app = _app(service, max_body_bytes=1000)
    service.refusal = InvariantViolation("two owners")
    named = {"x-request-id": "trace-7"}
    async with _client(app) as client, _client(app, key=False) as stranger:
        for answer, status in (
            (await client.get("/health", headers=named), 200),
            (await client.head("/health", headers=named), 200),
            (await client.options(CHAT, headers=named), 204),
            (await client.post(CHAT, content=b"{", headers=named), 400),
            (await stranger.post(CHAT, json=HELLO, headers=named), 401),
            (await client.get("/nowhere", headers=named), 404),
            (await client.post(CHAT, json=HELLO | {"model": "other"}, headers=named), 404),
            (await client.get(CHAT, headers=named), 405),
            (await client.post(CHAT, content=b" " * 2000, headers=named), 413),
            (await client.post(CHAT, json=HELLO, headers=named), 500),
        ):
            assert answer.status_code == status
            assert answer.headers.get_list("x-request-id")[0].startswith("trace-7"), status
            assert len(answer.headers.get_list("x-request-id")) == 1


async def test_every_error_of_the_messages_route_says_its_requests_id(service: ScriptedService) -> None:
    app = _app(service, max_body_bytes=1000)
    async with _client(app) as client, _client(app, key=False) as stranger:
        for sent in ({}, {"x-request-id": "trace-7"}):
            for answer, status in (
                (await stranger.post("/v1/messages", json=HELLO, headers=sent), 401),
                (await client.post("/v1/messages/nowhere", headers=sent), 404),
                (await client.get("/v1/messages", headers=sent), 405),
                (await client.post("/v1/messages/count_tokens", content=b"{", headers=sent), 400),
            ):
                assert answer.status_code == status
                request_id = answer.json()["request_id"]
                assert answer.headers.get_list("x-request-id") == [request_id]
                assert request_id == sent.get("x-request-id", request_id) != ""


async def test_an_id_that_is_not_sane_is_not_sent_back(client: httpx.AsyncClient) -> None:
    assert "x-request-id" not in (await client.get("/health", headers={"x-request-id": "<script>"})).headers
    assert "x-request-id" not in (await client.get("/health")).headers


# ── quotas ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def limited(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose tenant has quotas, of which something is left."""
    service.left["acme"] = Allowances(Allowance(600, 598.7, 0.13), Allowance(20_000, -12.0, 60.036))
    async with _client(_app(service)) as client:
        yield client


EXPECTED = {
    "x-ratelimit-limit-requests": "600",
    "x-ratelimit-remaining-requests": "598",
    "x-ratelimit-reset-requests": "130ms",
    "x-ratelimit-limit-tokens": "20000",
    "x-ratelimit-remaining-tokens": "0",
    "x-ratelimit-reset-tokens": "1m1s",
}


def _quotas(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit")}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_tells_what_is_left_of_the_tenants_quotas(
    limited: httpx.AsyncClient, stream: bool
) -> None:
    answer = await limited.post(CHAT, json=HELLO | {"stream": stream})
    assert answer.status_code == 200
    assert _quotas(answer) == EXPECTED


async def test_a_refusal_tells_it_too(limited: httpx.AsyncClient, service: ScriptedService) -> None:
    service.refusal_unheard = QueueFull("full", retry_after_s=1)
    answer = await limited.post(CHAT, json=HELLO)
    error_of(answer, 429)
    assert _quotas(answer) == EXPECTED
    assert answer.headers["retry-after"] == "1"


async def test_what_takes_nothing_of_a_quota_tells_nothing_of_it(limited: httpx.AsyncClient) -> None:
    assert _quotas(await limited.get("/v1/models")) == {}
    assert _quotas(await limited.get("/health")) == {}


async def test_a_tenant_is_told_of_the_quotas_that_it_has(
    client: httpx.AsyncClient, service: ScriptedService
) -> None:
    assert _quotas(await client.post(CHAT, json=HELLO)) == {}
    service.left["anyone"] = Allowances(requests=Allowance(60, 60.0, 0.0))
    assert _quotas(await client.post(CHAT, json=HELLO)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0171, "18ms"), (0.9999, "1s"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3601, "1h0m1s")],
)
def test_times_have_openais_form(seconds: float, text: str) -> None:
    assert duration(seconds) == text
