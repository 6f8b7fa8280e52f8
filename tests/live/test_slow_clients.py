"""Clients that do not take what they are sent, on real sockets: bounded, cut in the end, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from support.gateway import SILENCE, events, tiny_tokenizer
from support.http_gateway import HELLO, THE, Gateway, posted, read_until, running, until

from twinpool.coordinator.service import Output
from twinpool.errors import ClientTooSlow
from twinpool.request import FinishReason

BATCH = THE * 100
MANY = 200_000
"""Tokens of a text that is longer than what both kernels hold for a client with a small receive buffer."""


async def batches(num_tokens: int) -> AsyncIterator[Output]:
    """That many tokens, each a "the", as fast as they are taken."""
    for index in range(0, num_tokens, len(BATCH)):
        yield Output(BATCH, index)
        await asyncio.sleep(0)


async def then(first: AsyncIterator[Output], *rest: object) -> AsyncIterator[object]:
    """The outputs and then the steps `rest`; a FinishReason ends the answer."""
    num_tokens = 0
    async for output in first:
        num_tokens += len(output.token_ids)
        yield output
    for step in rest:
        yield Output((), num_tokens, step) if isinstance(step, FinishReason) else step


@contextlib.contextmanager
def not_reading(
    gateway: Gateway, path: str = "/v1/chat/completions", **wanted: object
) -> Iterator[socket.socket]:
    """A connection with a small receive buffer, on which a request was posted and nothing is read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.server.port))
        turns = {} if "prompt" in wanted else HELLO
        data = json.dumps({**turns, "stream": True, **wanted}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        client.setblocking(False)
        yield client


async def rest_of(client: socket.socket) -> str:
    """All that can still be read."""
    loop, parts = asyncio.get_running_loop(), []
    async with asyncio.timeout(20):
        while part := await loop.sock_recv(client, 1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def body_of(answer: str) -> str:
    """The body of an answer that came in chunks."""
    _, _, chunked = answer.partition("\r\n\r\n")
    parts = []
    while chunked:
        size, _, chunked = chunked.partition("\r\n")
        parts.append(chunked[: int(size, 16)])
        chunked = chunked[int(size, 16) + 2 :]
    return "".join(parts)


async def test_a_client_that_never_reads_is_cut_and_others_do_not_notice() -> None:
    async with running(max_buffered_bytes=200_000) as gateway:
        service = gateway.service
        service.script = lambda _: batches(1 << 30)
        with not_reading(gateway):
            await service.until(lambda: len(service.submissions) == 1)
            service.script = lambda _: then(batches(50_000), FinishReason.LENGTH)
            async with posted(gateway, {**HELLO, "stream": True}) as (reader, _):
                other = await read_until(reader, b"[DONE]\n\n", limit_s=30)
            await service.until(lambda: len(service.cuts) == 1)
        ((request_id, error),) = service.cuts
        assert request_id == service.submissions[0].request_id
        assert isinstance(error, ClientTooSlow)
        assert "200000 bytes behind" in error.message
        assert other.count(b"the") == 50_000
        assert gateway.metric("twinpool_slow_clients_cut_total") == 1


@pytest.mark.parametrize("n", [1, 4])
async def test_a_long_prompt_that_is_repeated_is_not_counted(n: int) -> None:
    """It comes at once, however fast the client is."""

    async def token_by_token() -> AsyncIterator[Output]:
        for index in range(5):
            yield Output(THE[:1], index)
            await asyncio.sleep(0)
        yield Output((), 5, FinishReason.LENGTH)

    async with running(max_buffered_bytes=50_000) as gateway:
        service = gateway.service
        service.max_model_len = 4096
        service.script = lambda _: token_by_token()
        wanted = {"prompt": [THE[0]] * 2000, "echo": True, "logprobs": 5, "n": n, "max_tokens": 5}
        with not_reading(gateway, "/v1/completions", **wanted) as client:
            await service.until(lambda: len(service.submissions) == n)
            await asyncio.sleep(0)
            answer = body_of(await rest_of(client))
    assert not service.cuts
    assert len(answer) > n * 200_000
    assert answer.endswith("data: [DONE]\n\n")


async def test_what_waits_for_a_client_of_several_answers_is_bounded_together() -> None:
    async with running(max_buffered_bytes=200_000) as gateway:
        service = gateway.service
        service.script = lambda _: batches(1 << 30)
        with not_reading(gateway, n=4):
            await service.until(lambda: len(service.cuts) == 4)
        assert {request_id for request_id, _ in service.cuts} == {s.request_id for s in service.submissions}
        assert all("200000 bytes behind" in error.message for _, error in service.cuts)
        assert gateway.metric("twinpool_slow_clients_cut_total") == 1


async def test_a_client_that_catches_up_has_every_token_of_every_answer_once() -> None:
    async with running(max_buffered_bytes=1 << 30) as gateway:
        service = gateway.service
        service.script = lambda _: then(batches(MANY), FinishReason.LENGTH)
        with not_reading(gateway, n=3, stream_options={"include_usage": True}) as client:
            await until(lambda: len(service.ended) == 3)
            async with asyncio.TaskGroup() as both:
                reading = both.create_task(rest_of(client))
                await service.until(lambda: len(service.delivered_ids) == 3)
                await gateway.server.stop(deadline_s=5.0)
            *chunks, usage, done = events(body_of(reading.result()))
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == 3 * MANY
        texts = ["", "", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
        assert texts == [tiny_tokenizer().decode(THE) * MANY] * 3


async def test_a_client_that_stalls_is_told_so_when_it_reads_again() -> None:
    async with running(client_stall_s=0.3, max_buffered_bytes=1 << 30) as gateway:
        service = gateway.service
        service.script = lambda _: then(batches(MANY), SILENCE)
        with not_reading(gateway) as client:
            await service.until(lambda: len(service.cuts) == 1)
            answer = body_of(await rest_of(client))
        *_, last = events(answer)
        assert last["error"]["code"] == "client_too_slow"
        assert "[DONE]" not in answer


async def test_a_stalled_client_that_never_reads_again_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twinpool.coordinator.gateway.http_protocol.GRACE_S", 0.0)
    async with running(client_stall_s=0.3, max_buffered_bytes=1 << 30) as gateway:
        service = gateway.service
        service.script = lambda _: then(batches(MANY), SILENCE)
        with not_reading(gateway) as client:
            await service.until(lambda: len(service.cuts) == 1)
            await until(lambda: gateway.metric("twinpool_http_connections") == 0)
            with pytest.raises(ConnectionResetError):
                await rest_of(client)


async def test_a_whole_answer_that_nobody_takes_is_broken_off() -> None:
    async with running(client_stall_s=0.3) as gateway:
        service = gateway.service
        service.script = lambda _: then(batches(MANY), FinishReason.LENGTH)
        with not_reading(gateway, stream=False) as client:
            await until(lambda: gateway.metric("twinpool_slow_clients_cut_total") == 1)
            with pytest.raises(ConnectionResetError):
                await rest_of(client)
        assert service.cuts == []


async def test_a_client_that_catches_up_has_every_token_once() -> None:
    async with running(max_buffered_bytes=1 << 30) as gateway:
        service = gateway.service
        service.script = lambda _: then(batches(MANY), FinishReason.LENGTH)
        with not_reading(gateway) as client:
            await service.until(lambda: len(service.submissions) == 1)
            await until(lambda: bool(service.ended))
            assert gateway.metric("twinpool_client_buffered_bytes") > 0
            async with asyncio.TaskGroup() as both:
                reading = both.create_task(rest_of(client))
                await service.until(lambda: len(service.delivered_ids) == 1)
                await gateway.server.stop(deadline_s=5.0)
        *chunks, done = events(body_of(reading.result()))
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == "the" * MANY
        assert done == "[DONE]"
        assert len(chunks) < MANY / len(BATCH) / 2, "what waited came in few pieces"


async def test_a_stop_string_ends_the_work_for_a_client_that_does_not_read() -> None:
    async with running(max_buffered_bytes=1 << 30) as gateway:
        service = gateway.service
        dog = tuple(tiny_tokenizer().encode(" dog"))
        service.script = lambda _: then(batches(80_000), Output(dog, 80_000), SILENCE)
        with not_reading(gateway, stop=" dog"):
            await service.until(lambda: len(service.completed) == 1)
        assert service.completed == [(service.submission.request_id, 80_000 + len(dog))]
        assert service.cuts == []
