"""What strangers may do to the HTTP port: little, and always with an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator

import httpx
import pytest
from support.gateway import SILENCE
from support.http_gateway import HELLO, THE, Gateway, posted, read_until, running

from twinpool.coordinator.gateway.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS
from twinpool.coordinator.service import Output
from twinpool.request import FinishReason

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running() as gateway:
        yield gateway


async def send(gateway: Gateway, *parts: bytes, ends: bool = False) -> bytes:
    """All that the server answers to these bytes before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
            if ends:
                writer.write_eof()
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def assert_refused(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    assert json.loads(body)["error"]["type"] in ("invalid_request_error", "service_unavailable_error")


@pytest.mark.parametrize(
    "head",
    [
        GET + b"a: " + b"x" * (MAX_HEAD_BYTES + 1),
        GET + b"a: b\r\n" * (MAX_HEADERS + 1),
        GET + b"".join(b"a%d: %s\r\n" % (i, b"x" * 1024) for i in range(64)) + b"\r\n",
        b"GET /" + b"x" * (MAX_HEAD_BYTES + 1),
    ],
)
async def test_a_head_over_the_limits_is_431(gateway: Gateway, head: bytes) -> None:
    assert_refused(await send(gateway, head), 431)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_400(gateway: Gateway, junk: bytes) -> None:
    assert_refused(await send(gateway, junk), 400)


@pytest.mark.parametrize("head", [GET, b"\r\n", b"G"])
async def test_a_head_that_does_not_end_is_408(head: bytes) -> None:
    async with running(head_timeout_s=0.1) as gateway:
        assert_refused(await send(gateway, head), 408)


@pytest.mark.parametrize("start", [GET, b"\r\n"])
async def test_a_second_head_on_a_connection_is_timed_too(start: bytes) -> None:
    async with running(head_timeout_s=0.1) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
        writer.write(GET + b"\r\n")
        assert b"version" in await read_until(reader, b"}")
        writer.write(start)
        assert_refused(await asyncio.wait_for(reader.read(), 10), 408)
        writer.close()


async def test_a_body_that_does_not_come_is_408() -> None:
    async with running(body_timeout_s=0.1) as gateway:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        assert_refused(await send(gateway, head), 408)


async def test_a_client_that_goes_on_sending_a_body_that_is_too_long_reads_why(gateway: Gateway) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n"
    assert_refused(await send(gateway, head, *[b" " * 1_000_000] * 9), 413)


async def test_more_connections_than_allowed_are_503() -> None:
    async with running(max_connections=2) as gateway, posted(gateway, HELLO), posted(gateway, HELLO):
        await gateway.service.until(lambda: len(gateway.service.submissions) == 2)
        answer = await send(gateway, GET + b"\r\n", b"x" * 100_000)
        assert_refused(answer, 503)
        assert b"retry-after: 1" in answer


async def test_a_request_before_the_last_is_answered_is_not_read(gateway: Gateway) -> None:
    gateway.service.script = lambda _: [Output(THE, 0, FinishReason.LENGTH)]
    data = json.dumps(HELLO).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    answer = await send(gateway, (head + data) * 3)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert len(gateway.service.submissions) == 1


async def test_a_client_that_pipelines_and_leaves_is_noticed(gateway: Gateway) -> None:
    service = gateway.service
    service.script = lambda _: [SILENCE]
    async with posted(gateway, HELLO) as (_, writer):
        await service.until(lambda: len(service.submissions) == 1)
        writer.write(GET + b"\r\n")
        await writer.drain()
    await service.until(lambda: service.abandoned == [service.submission.request_id])


async def test_an_http_1_0_client_gets_a_stream_without_chunks(gateway: Gateway) -> None:
    data = json.dumps({**HELLO, "stream": True}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\nconnection: keep-alive\r\n\r\n"
        % len(data)
    )
    head, _, body = (await send(gateway, head + data)).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_an_http_1_0_client_gets_whole_answers(gateway: Gateway) -> None:
    _, _, body = (await send(gateway, b"GET /version HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert "version" in json.loads(body)


async def test_an_upgrade_is_answered_as_if_it_had_not_been_asked_for(gateway: Gateway) -> None:
    answer = await send(gateway, GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "body",
    [
        b'content-length: 14\r\n\r\n{"prompt":"a"}',
        b'transfer-encoding: chunked\r\n\r\n7\r\n{"promp\r\n7\r\nt":"a"}\r\n0\r\n\r\n',
    ],
)
@pytest.mark.parametrize("num_parts", [1, 7])
async def test_a_request_that_asks_for_an_upgrade_keeps_its_body(
    gateway: Gateway, body: bytes, num_parts: int
) -> None:
    asking = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    )
    pipelined = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\njunk"
    request = asking + body + pipelined
    size = -(-len(request) // num_parts)
    answer = await send(gateway, *(request[i : i + size] for i in range(0, len(request), size)))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer


async def test_headers_behind_a_body_are_dropped(gateway: Gateway) -> None:
    answer = await send(
        gateway,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        b'e\r\n{"prompt":"a"}\r\n0\r\nx-request-id: late\r\n\r\n',
    )
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"late" not in answer


@pytest.mark.parametrize("seed", range(3))
async def test_junk_never_stops_the_server(seed: int) -> None:
    rng = random.Random(seed)
    words = (
        GET, b"\r\n", b"\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n", b"content-length: 5\r\n", b"{}", b"a: b\r\n",
        b"transfer-encoding: chunked\r\n", b"5\r\nabcde\r\n", b"0\r\n\r\n", b"expect: 100-continue\r\n", b"\0",
    )  # fmt: skip

    def junk() -> list[bytes]:
        return [
            rng.choice((rng.choice(words), rng.randbytes(rng.randrange(64)))) for _ in range(rng.randrange(9))
        ]

    async with running(head_timeout_s=0.2, body_timeout_s=0.2) as gateway:
        async with asyncio.TaskGroup() as all_at_once:
            for _ in range(60):
                all_at_once.create_task(send(gateway, *junk(), ends=True))
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{gateway.url}/version")).status_code == 200
