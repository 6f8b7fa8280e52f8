"""A server that answers exactly as it is told, and notes when it sent what: to test load generators with.

`python -m twinpool.bench.scripted_server` prints its port. A prompt that is a `Script` in JSON is answered by that
script; every other one by the flags (`--ttft-ms`, `--itl-ms`, `--jitter`). `GET /log` has the times of all requests so
far, on the monotonic clock that all processes of a machine share, so what a client measured can be compared with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop

from twinpool.bench.scripted_answer import MODEL, AnswerEvents, Piece, Script, Then

_CHUNKED = b"transfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n"
_REASONS = {200: "OK", 429: "Too Many Requests", 503: "Service Unavailable"}
_STOP_LIMIT_S = 30.0


class Sent(msgspec.Struct):
    """What was sent for one request, and when (monotonic clock)."""

    request_id: str
    received_at: float
    pieces_at: list[float]
    ended_at: float | None = None
    was_left: bool = False
    """The client went away before the end."""


class _Prompt(msgspec.Struct):
    content: str | list[dict[str, Any]]


class _Body(msgspec.Struct):
    """What is read of a request."""

    prompt: Any = None
    messages: list[_Prompt] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    return_token_ids: bool = False


class _Connection(asyncio.Protocol):
    """One client's connection. Requests on it come one after another."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = ""
        self._body = b""
        self._headers: dict[str, str] = {}
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's
        self._transport = None
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_message_begin(self) -> None:
        self._path, self._body, self._headers = "", b"", {}

    def on_url(self, url: bytes) -> None:
        self._path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        received_at = time.monotonic()
        if self._path.endswith("/completions"):
            request_id = self._headers.get("x-request-id", "")
            sent = Sent(request_id, received_at, [])
            self._server.log.append(sent)
            is_chat = self._path.endswith("/chat/completions")
            self._answering = asyncio.create_task(self._answer(self._body, sent, is_chat))
        else:
            self._reply(*self._server.page(self._path))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _reply(self, status: int, body: bytes, more_headers: str = "") -> None:
        reason = _REASONS.get(status, "Status")
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-length: {len(body)}\r\n{more_headers}\r\n"
        self._write(head.encode() + body)

    async def _answer(self, body: bytes, sent: Sent, is_chat: bool) -> None:
        try:
            wanted = msgspec.json.decode(body, type=_Body)
            script = self._server.script_for(wanted)
            if script.status == 200:
                await self._stream(script, sent, AnswerEvents(script, is_chat, wanted.return_token_ids))
            else:
                await asyncio.sleep(script.pieces[0].after_s if script.pieces else 0.0)
                self._refuse(script)
        except msgspec.MsgspecError as exc:
            self._reply(400, msgspec.json.encode({"error": {"message": str(exc)}}))
        except asyncio.CancelledError:
            sent.was_left = True
            raise
        sent.ended_at = time.monotonic()

    def _refuse(self, script: Script) -> None:
        retry = "" if script.retry_after_s is None else f"retry-after: {script.retry_after_s}\r\n"
        self._reply(script.status, script.error_json(), retry)

    async def _stream(self, script: Script, sent: Sent, events: AnswerEvents) -> None:
        loop = asyncio.get_running_loop()
        head = b"HTTP/1.1 200 OK\r\n" + _CHUNKED + f"x-request-id: {sent.request_id}\r\n\r\n".encode()
        if script.has_role and events.is_chat:
            self._write(head + events.role())
            head = b""
        due = loop.time()
        for piece in script.pieces:
            due += piece.after_s
            await _at(loop, due)
            sent.pieces_at.append(time.monotonic())
            event = events.piece(piece)
            if script.cut_bytes:
                await self._write_cut(head + event, script.cut_bytes)
            else:
                self._write(head + event)
            head = b""
        match script.then:
            case Then.DONE:
                self._write(head + events.closing())
            case Then.ERROR:
                self._write(head + events.error())
            case Then.BREAK:
                self._write(head)
                self.close()
            case Then.NOTHING:
                self._write(head)
                await asyncio.Event().wait()

    async def _write_cut(self, data: bytes, size: int) -> None:
        """In packets: what one turn of the loop writes goes out in one."""
        for start in range(0, len(data), size):
            self._write(data[start : start + size])
            await asyncio.sleep(0)


class ScriptedServer:
    """The state that all connections share."""

    def __init__(self, ttft_s: float, itl_s: float, jitter: float, owned_by: str, seed: int = 1) -> None:
        self.log: list[Sent] = []
        self._ttft_s, self._itl_s, self._jitter = ttft_s, itl_s, jitter
        self._owned_by = owned_by
        self._rng = random.Random(seed)

    def connection(self) -> asyncio.Protocol:
        """For a new client."""
        return _Connection(self)

    def script_for(self, wanted: _Body) -> Script:
        """The prompt's own script, or one by the flags. Raises msgspec.MsgspecError for a broken script."""
        prompt = wanted.messages[-1].content if wanted.messages else wanted.prompt
        if isinstance(prompt, str) and prompt.startswith("{"):
            return msgspec.json.decode(prompt, type=Script)
        num_tokens = wanted.max_completion_tokens or wanted.max_tokens or 16
        return Script(tuple(self._usual_pieces(num_tokens)))

    def _usual_pieces(self, num_tokens: int) -> Iterator[Piece]:
        for index in range(num_tokens):
            usual_s = self._itl_s if index else self._ttft_s
            stretched = self._rng.lognormvariate(0.0, self._jitter) if self._jitter else 1.0
            yield Piece(usual_s * stretched)

    def page(self, path: str) -> tuple[int, bytes]:
        """Anything but a request for an answer: status and body."""
        if path.endswith("/models"):
            card = {"id": MODEL, "object": "model", "owned_by": self._owned_by, "max_model_len": 1 << 20}
            return 200, msgspec.json.encode({"object": "list", "data": [card]})
        if path.endswith("/log"):
            return 200, msgspec.json.encode(self.log)
        if path.endswith(("/health", "/ready")):
            return 200, b'{"status":"ok"}'
        return 404, b'{"error":{"message":"no such page"}}'


async def _at(loop: asyncio.AbstractEventLoop, due: float) -> None:
    await asyncio.sleep(max(0.0, due - loop.time()))


async def _serve(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    owner = args.owned_by
    server = ScriptedServer(args.ttft_ms / 1e3, args.itl_ms / 1e3, args.jitter, owner, args.seed)
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    tls = None
    if args.certificate is not None:
        import ssl

        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(args.certificate)
    listening = await loop.create_server(server.connection, args.host, args.port, ssl=tls, backlog=4096)
    print(listening.sockets[0].getsockname()[1], flush=True)
    if args.until_stdin_ends:
        loop.add_reader(0, over.set)
    await over.wait()
    listening.close()


@contextlib.contextmanager
def running(*arguments: str, scheme: str = "http") -> Iterator[str]:
    """One in a process of its own, with these flags; gives its URL, and ends it."""
    command = [sys.executable, "-m", "twinpool.bench.scripted_server", "--until-stdin-ends", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            yield f"{scheme}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(_STOP_LIMIT_S)


def sent_by(url: str) -> dict[str, Sent]:
    """What the server at `url` sent so far, by request id, in the order of the requests."""
    with urllib.request.urlopen(f"{url}/log", timeout=_STOP_LIMIT_S) as answer:
        entries = msgspec.json.decode(answer.read(), type=list[Sent])
    return {entry.request_id: entry for entry in entries}


def main() -> int:
    """Serves until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    parser.add_argument(
        "--ttft-ms", type=float, default=50.0, metavar="MS", help="of unscripted answers (50)"
    )
    parser.add_argument("--itl-ms", type=float, default=20.0, metavar="MS", help="of unscripted answers (20)")
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="SIGMA",
        help="stretches both by a lognormal factor (0: none)",
    )
    parser.add_argument(
        "--owned-by", default="twinpool", metavar="NAME", help="what /v1/models says (twinpool)"
    )
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE", help="speak HTTPS: certificate and key, PEM"
    )
    parser.add_argument("--core", type=int, metavar="N", help="run on this core only")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the jitter (1)")
    parser.add_argument("--until-stdin-ends", action="store_true", help="end with whoever started it")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
