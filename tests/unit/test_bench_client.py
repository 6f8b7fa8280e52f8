"""The measuring client against a server that does exactly what a test tells it, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from twinpool.bench.client import Client, Departure, End, Generation
from twinpool.errors import ConfigError

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-request-id: r-1\r\n\r\n"
END = b"0\r\n\r\n"
ASK = Generation("hello", 4)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(json: bytes) -> bytes:
    return chunk(b"data: " + json + b"\n\n")


def token(*ids: int, text: str = "x") -> bytes:
    return event(b'{"choices":[{"text":"%s","token_ids":%s}]}' % (text.encode(), str(list(ids)).encode()))


FINISH = event(b'{"choices":[{"text":"","finish_reason":"length"}],"usage":null}')
USAGE = event(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}')
DONE = chunk(b"data: [DONE]\n\n") + END


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[Client]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def saying(*parts: bytes) -> Answer:
    """Sends each part by itself, so that the client reads them one by one."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


async def test_a_whole_stream_is_recorded_token_by_token() -> None:
    async with answering(saying(HEAD, token(5, text="a"), token(6, text="b"), FINISH, USAGE, DONE)) as client:
        outcome = await client.generate(ASK, limit_s=10)
    assert (outcome.end, outcome.finish_reason, outcome.request_id) == (End.COMPLETE, "length", "r-1")
    assert (outcome.token_ids, outcome.text) == ([5, 6], "ab")
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (3, 2)
    assert outcome.first_output_at == outcome.token_at[0]
    assert outcome.sent_at <= outcome.token_at[0] <= outcome.token_at[1] <= outcome.ended_at


async def test_events_may_be_cut_anywhere() -> None:
    whole = HEAD + chunk(b": keep-alive\n\n") + token(5, 6) + FINISH + DONE
    for cut in range(0, len(whole), 7):
        async with answering(saying(whole[:cut], whole[cut:])) as client:
            outcome = await client.generate(ASK, limit_s=10)
        assert (outcome.end, outcome.token_ids) == (End.COMPLETE, [5, 6])


async def test_an_error_event_is_a_failure_with_its_text() -> None:
    failed = event(b'{"error":{"message":"lost 3 times","type":"server_error","code":"request_failed"}}')
    async with answering(saying(HEAD, token(5), failed, END)) as client:
        outcome = await client.generate(ASK, limit_s=10)
    assert (outcome.end, outcome.token_ids) == (End.FAILED, [5])
    assert (outcome.error, outcome.error_code) == ("lost 3 times", "request_failed")


async def test_a_refusal_has_its_status_its_reason_and_when_to_come_back() -> None:
    body = b'{"error":{"message":"busy","code":"queue_full"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with answering(saying(head, body)) as client:
        outcome = await client.generate(ASK, limit_s=10)
    assert (outcome.end, outcome.status, outcome.retry_after_s) == (End.REFUSED, 429, 3.0)
    assert (outcome.error, outcome.error_code) == ("busy", "queue_full")


@pytest.mark.parametrize(
    "said",
    [
        (),
        (HEAD, token(5)),
        (HEAD, token(5), END),
        (HEAD, token(5), DONE),
        (b"this is not HTTP\r\n\r\n",),
    ],
)
async def test_without_a_terminal_event_a_stream_is_broken(said: tuple[bytes, ...]) -> None:
    async with answering(saying(*said)) as client:
        assert (await client.generate(ASK, limit_s=10)).end is End.BROKEN


async def test_a_client_leaves_at_its_token_and_the_server_notices() -> None:
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token(5) + token(6))
        try:
            while await reader.read(1024):
                pass
        except ConnectionResetError:
            pass
        gone.set()

    async with answering(answer) as client:
        outcome = await client.generate(ASK, limit_s=10, departure=Departure(after_tokens=2))
        await asyncio.wait_for(gone.wait(), 10)
    assert (outcome.end, outcome.token_ids) == (End.LEFT, [5, 6])


async def test_a_client_leaves_after_its_time_and_one_that_stays_hangs_until_its_limit() -> None:
    async def answer(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1024):
                pass
        except ConnectionResetError:
            pass

    async with answering(answer) as client:
        left = await client.generate(ASK, limit_s=10, departure=Departure(after_s=0.01))
        stayed = await client.generate(ASK, limit_s=0.05)
    assert (left.end, stayed.end) == (End.LEFT, End.HUNG)


async def test_nobody_at_the_address_is_an_outcome_too() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outcome = await Client(f"http://127.0.0.1:{port}").generate(ASK, limit_s=10)
    assert outcome.end is End.UNREACHABLE
    assert outcome.error


async def test_a_get_that_breaks_off_raises() -> None:
    async with answering(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhal")) as client:
        with pytest.raises(ConnectionResetError, match="/metrics broke off"):
            await client.get("/metrics")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "127.0.0.1:8000", "http://", "http://host:port"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Client(url)
