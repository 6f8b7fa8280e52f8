"""One real server, and junk on each of its ports: it says no, counts, and goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from support.coordinator_core import register
from support.join_token import TEST_TOKEN
from support.served_model import save_served_model
from support.server import Server, serving, wait_for

from twinpool.channel import DealerChannel
from twinpool.config import Role
from twinpool.join_token import VARIABLE
from twinpool.messages import Denied, Granted, Message, StepTokens, Token
from twinpool.request import RequestKey

DEADLINE_S = 20.0
JUNK = {
    "nothing": b"",
    "HTTP": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a request": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5000\r\n\r\n{",
    "ZMTP": b"\xff"
    + bytes(8)
    + b"\x7f\x03\x01"
    + b"NULL".ljust(20, b"\0")
    + bytes(32)
    + b"\x04\x19\x05READY",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "KV hello": b"TWINKV02" + bytes(18) + bytes(32),
    "zeros": bytes(70_000),
    "ones": b"\xff" * 70_000,
    "noise": secrets.token_bytes(70_000),
}
QUESTION = {"model": "tiny", "prompt": "Never mind the junk", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("junk")
    model = save_served_model(directory)
    arguments = (
        str(model),
        "--served-model-name=tiny",
        "--transport=tcp",
        "--num-blocks=300",
        "--dtype=float32",
    )
    with serving(directory, *arguments, environment={VARIABLE: TEST_TOKEN.text}) as server:
        yield server


def processes(server: Server) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def listening(server: Server) -> set[tuple[str, int]]:
    """Address and port of every socket on which a process of this server listens."""
    sockets = [c for process in processes(server) for c in process.net_connections("all")]
    return {(c.laddr.ip, c.laddr.port) for c in sockets if c.status == psutil.CONN_LISTEN and c.laddr}


def port_of_workers(server: Server) -> int:
    """The coordinator's control port, from its own connections: workers hold theirs to it."""
    own = {
        c.laddr.port for c in processes(server)[0].net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    own.remove(int(server.url.rpartition(":")[2]))
    (port,) = own
    return port


@pytest.mark.timeout(120)
def test_nothing_listens_beyond_this_host_and_the_token_is_not_to_be_seen(server: Server) -> None:
    ports = listening(server)
    assert len(ports) >= 4  # HTTP, control, a decode worker's messages and its KV
    assert {ip for ip, _ in ports} == {"127.0.0.1"}
    assert not any(TEST_TOKEN.text in " ".join(process.cmdline()) for process in processes(server))
    assert TEST_TOKEN.text not in server.log


@pytest.mark.timeout(120)
def test_junk_on_every_port_changes_nothing(server: Server) -> None:
    def answer() -> object:
        response = server.post("/v1/completions", QUESTION)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    before, pids, size = answer(), server.worker_pids(), len(server.log)
    for host, port in sorted(listening(server)):
        for junk in JUNK.values():
            with socket.create_connection((host, port), timeout=DEADLINE_S) as connection, suppress(OSError):
                connection.sendall(junk)
                connection.shutdown(socket.SHUT_WR)
    asyncio.run(join_and_rant(f"tcp://127.0.0.1:{port_of_workers(server)}"))
    assert answer() == before
    assert server.worker_pids() == pids
    strangers, junk = "twinpool_refused_connections_total", "twinpool_junk_messages_total"
    wait_for("strangers are counted", lambda: server.metric(strangers, worker="coordinator") >= len(JUNK) - 2)
    wait_for("the peer port's too", lambda: server.metric(strangers, role="decode") >= len(JUNK) - 2)
    wait_for(
        "strangers on the KV port are counted", lambda: server.metric(junk, role="decode") >= len(JUNK) - 2
    )
    assert server.metric(junk, worker="coordinator") >= 2
    assert server.metric("twinpool_workers_denied_total") == 1
    server.wait_until_empty()
    assert server.log[size:].count("\n") < 30, server.log[size:]


def post(body: bytes, *headers: bytes) -> bytes:
    """A request for a completion as it goes over the wire."""
    lines = (b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def sized(body: bytes, *headers: bytes) -> bytes:
    """The same with its true length."""
    return post(body, b"Content-Length: %d" % len(body), *headers)


CROOKED = {
    "no JSON": sized(b"{"),
    "no UTF-8": sized(b'{"prompt": "\xff\xfe"}'),
    "lone surrogate": sized(b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": "x"}'),
    "nested": sized(b"[" * 50_000),
    "huge number": sized(b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 5_000 + b"}"),
    "tokens of no vocabulary": sized(b'{"model": "tiny", "prompt": [4294967296, -1]}'),
    "another model": sized(b'{"model": "' + b"x" * 5_000 + b'", "prompt": "x"}'),
    "bad chunk": post(b"zz\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "two lengths": post(b"{}", b"Content-Length: 2", b"Content-Length: 3"),
    "negative length": post(b"{}", b"Content-Length: -1"),
    "length and chunks": post(b"0\r\n\r\n", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "nul in a header": sized(b"{}", b"X-Request-Id: a\0b"),
    "a long id": sized(b'{"model": "tiny", "prompt": "x"}', b"X-Request-Id: " + b"a" * 5_000),
    "a silly deadline": sized(b'{"model": "tiny", "prompt": "x"}', b"X-Request-Timeout: nan"),
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5_000 + b"\r\n",
    "no method": b"\0\0\0 / HTTP/9.9\r\n\r\n",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("request_bytes", CROOKED.values(), ids=CROOKED)
def test_a_crooked_request_is_refused_and_is_no_failure_of_the_server(
    server: Server, request_bytes: bytes
) -> None:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        with suppress(ConnectionError):  # it may hang up before it has read all
            connection.sendall(request_bytes)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert server.get("/health").status_code == 200


async def join_and_rant(control: str) -> None:
    """One who has the token sends no messages, messages that make no sense, and an offer that cannot be taken."""
    answers: asyncio.Queue[Message] = asyncio.Queue()
    key = RequestKey("nobody's", 1)
    with DealerChannel(
        control, "prefill-9/z", TEST_TOKEN, lambda _, answer: answers.put_nowait(answer), fail
    ) as channel:
        for data in (b"", b"\xc1", secrets.token_bytes(5000), b"\x91" * 5000):
            channel._socket.send(data)
        channel.send(Granted(key, 1, (1, 2), 0, 0.0))
        channel.send(StepTokens((Token(key, 0, 2**31 - 1),)))
        channel.send(register("prefill-9", Role.PREFILL, "z"))
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await answers.get(), Denied)


def fail(identity: str, error: Exception) -> None:
    raise AssertionError((identity, error))
