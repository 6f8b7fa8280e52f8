"""A streaming client that measures: what came, when each token came, and how the stream ended.

It speaks HTTP/1.1 on a connection per request, which it closes to leave. What it does per token is little (a C parser
for HTTP, a typed decoder for JSON), because it shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from twinpool.config import require

CONNECT_LIMIT_S = 10.0
GET_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked of `POST /v1/completions`: a text, or token ids. With `seed` None the server draws one."""

    prompt: str | Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = True
    stop: tuple[str, ...] = ()

    def body(self) -> bytes:
        """The JSON body of a streamed request that gives token ids and usage back."""
        values: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.seed is not None:
            values["seed"] = self.seed
        if self.stop:
            values["stop"] = self.stop
        return msgspec.json.encode(values)


@dataclass(frozen=True, slots=True)
class Departure:
    """When a client leaves: so long after sending, or at so many tokens of the answer, whichever is first."""

    after_s: float | None = None
    after_tokens: int | None = None


class End(StrEnum):
    """How a request ended, for its client."""

    COMPLETE = "complete"
    FAILED = "failed"
    """An error event ended the stream."""
    REFUSED = "refused"
    """A status other than 200."""
    LEFT = "left"
    BROKEN = "broken"
    """The connection ended without a terminal event."""
    HUNG = "hung"
    """The time limit passed without an end."""
    UNREACHABLE = "unreachable"


@dataclass(slots=True)
class Outcome:
    """All that one request's client saw. Times are its monotonic clock's, in seconds.

    `token_ids[i]` arrived at `token_at[i]`; tokens that came in one piece have one time. `first_output_at` is when the
    first token or text came.
    """

    request_id: str = ""
    end: End = End.BROKEN
    sent_at: float = 0.0
    ended_at: float = 0.0
    first_output_at: float | None = None
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    token_at: list[float] = field(default_factory=list)
    text: str = ""
    num_body_bytes: int = 0
    finish_reason: str | None = None
    error: str = ""
    error_code: str = ""
    retry_after_s: float | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    """The server's counts (usage), which come behind the answer."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """Talks to one server. Each call uses a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        require("--url", url, parts.scheme == "http" and bool(parts.hostname), "like http://127.0.0.1:8000")
        self.host, self.port = parts.hostname or "", parts.port or 80
        self._headers = [f"Host: {self.host}:{self.port}", "Connection: close"]
        if api_key is not None:
            self._headers.append(f"Authorization: Bearer {api_key}")

    async def get(self, path: str, limit_s: float = GET_LIMIT_S) -> Response:
        """Fetches `path`. Raises OSError (not reachable, broken off) and TimeoutError."""
        parts: list[bytes] = []
        exchange = _Exchange(parts.append)
        async with asyncio.timeout(limit_s):
            await self._open(exchange, self._request("GET", path, b"", ()))
            await exchange.over
        if not exchange.is_whole:
            raise ConnectionResetError(f"the answer to GET {path} broke off")
        return Response(exchange.status, exchange.headers, b"".join(parts))

    async def generate(
        self, generation: Generation, limit_s: float, departure: Departure | None = None, request_id: str = ""
    ) -> Outcome:
        """Sends the request and follows its stream, at most `limit_s`. What a server does is an outcome, no error."""
        headers = ["Content-Type: application/json"]
        if request_id:
            headers.append(f"X-Request-Id: {request_id}")
        recorder = _Recorder(departure or Departure())
        exchange = recorder.exchange
        outcome = recorder.outcome
        outcome.request_id = request_id
        request = self._request("POST", "/v1/completions", generation.body(), headers)
        outcome.sent_at = time.monotonic()
        leaving: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(limit_s):
                await self._open(exchange, request)
                outcome.sent_at = time.monotonic()
                if departure is not None and departure.after_s is not None:
                    leaving = asyncio.get_running_loop().call_later(departure.after_s, recorder.leave)
                await exchange.over
        except TimeoutError:
            outcome.end = End.HUNG
        except OSError as exc:
            outcome.end, outcome.error = End.UNREACHABLE, str(exc)
        else:
            recorder.close()
        finally:
            if leaving is not None:
                leaving.cancel()
            exchange.leave()
        outcome.ended_at = time.monotonic()
        return outcome

    async def _open(self, exchange: _Exchange, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_LIMIT_S):
            await loop.create_connection(lambda: exchange, self.host, self.port)
        exchange.send(request)

    def _request(self, method: str, path: str, body: bytes, headers: list[str] | tuple[()]) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", *self._headers, *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class _Exchange(asyncio.Protocol):
    """One request and its answer. `over` is done when the answer is whole or the connection has ended."""

    def __init__(self, on_body: Callable[[bytes], None]) -> None:
        self.on_body = on_body  # httptools looks for it when it is made
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.headers: dict[str, str] = {}
        self.status = 0
        self.is_whole = False

    def send(self, data: bytes) -> None:
        assert self._transport is not None, "the connection is open"
        self._transport.write(data)

    def leave(self) -> None:
        """Closes the connection at once. Calling it twice is fine."""
        if self._transport is not None:
            self._transport.abort()
        self._finish()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.leave()  # not an answer in HTTP: it stays unfinished

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's
        self._finish()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self.is_whole = True
        self._finish()

    def _finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = []


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


class _Recorder:
    """Turns the bytes of one answer into an `Outcome`."""

    def __init__(self, departure: Departure) -> None:
        self.outcome = Outcome()
        self.exchange = _Exchange(self._take)
        self._leave_at_tokens = departure.after_tokens
        self._buffer = b""

    def leave(self) -> None:
        """The client goes away now, unless its answer is over."""
        if not self.exchange.over.done():
            self.outcome.end = End.LEFT
            self.exchange.leave()

    def close(self) -> None:
        """The exchange is over: says how."""
        outcome, exchange = self.outcome, self.exchange
        outcome.status = exchange.status
        outcome.request_id = exchange.headers.get("x-request-id", outcome.request_id)
        if outcome.end is End.LEFT or not exchange.is_whole:
            return
        if exchange.status == 200:
            if outcome.error:
                outcome.end = End.FAILED
            elif outcome.finish_reason is not None:
                outcome.end = End.COMPLETE
            return
        outcome.end = End.REFUSED
        if "retry-after" in exchange.headers:
            outcome.retry_after_s = float(exchange.headers["retry-after"])
        self._event(self._buffer)

    def _take(self, data: bytes) -> None:
        self.outcome.num_body_bytes += len(data)
        self._buffer += data
        if self.exchange.status != 200:
            return
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._event(event[6:])

    def _event(self, data: bytes) -> None:
        outcome = self.outcome
        try:
            event = _decode(data)
        except msgspec.MsgspecError:
            outcome.error = f"not an event: {data[:200]!r}"
            return
        if event.error is not None:
            outcome.error, outcome.error_code = event.error.message, event.error.code or ""
        if event.usage is not None:
            outcome.num_prompt_tokens = event.usage.prompt_tokens
            outcome.num_output_tokens = event.usage.completion_tokens
        for choice in event.choices:
            self._choice(choice)

    def _choice(self, choice: _Choice) -> None:
        outcome = self.outcome
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if not (choice.text or choice.token_ids):
            return
        now = time.monotonic()
        if outcome.first_output_at is None:
            outcome.first_output_at = now
        outcome.text += choice.text
        outcome.token_ids += choice.token_ids
        outcome.token_at += [now] * len(choice.token_ids)
        if self._leave_at_tokens is not None and len(outcome.token_ids) >= self._leave_at_tokens:
            self.leave()
