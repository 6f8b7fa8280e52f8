"""One HTTP connection, bounded in everything that its client decides: uvicorn's protocol, and what it lacks.

Bounds hold for the bytes and the time of a request's head, for how long a written byte may wait to be taken, and for
what comes behind a request (pipelining). A client that takes nothing for too long is cut (`check`): the running answer
puts its last event behind what is buffered, and the connection is broken off unless that is taken within `GRACE_S`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.connection import CONNECTION
from twinpool.coordinator.gateway.error_answers import HttpError, error_headers
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.gateway.shapes import error_json
from twinpool.coordinator.gateway.unframed_send import UnframedSend
from twinpool.errors import RequestError, TryLater
from twinpool.metrics import GatewayMetric

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
WRITE_HIGH_BYTES = 64 << 10
"""A client for which more than this is buffered here is behind: writes to it wait."""
GRACE_S = 5.0
"""A client that is cut may take so long to read the error event behind what is buffered for it."""
LINGER_S = 1.0
"""A refused client that is still sending has so long to read why."""
_FRAMING = (b"content-length", b"transfer-encoding")
NO_LINGERING = struct.pack("ii", 1, 0)
"""SO_LINGER, on and 0 s: an abort then sends a reset."""


class TooManyConnections(TryLater):
    """All connections that the server takes are in use."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "service_unavailable_error"
    code = "too_many_connections"


class _Pipelined(Exception):
    """A second request came before the first was answered. It is not read, and the answer closes the connection."""


class ClientTransport:
    """A transport that counts what is written. That, less what is buffered, is what the client's side has taken.

    `close` asks `lingers` first, which returns true if it will close the transport itself, later.
    """

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]) -> None:
        self._transport = transport
        self._lingers = lingers
        self.num_written = 0

    def close(self) -> None:
        """Closes, when everything is sent."""
        if not self._lingers():
            self._transport.close()

    def write(self, data: bytes) -> None:
        """Writes, and counts."""
        self.num_written += len(data)
        self._transport.write(data)

    @property
    def num_taken(self) -> int:
        """Bytes that have left this process."""
        return self.num_written - self._transport.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GatewayProtocol(HttpToolsProtocol):
    """One client's `Connection`."""

    def __init__(self, limits: GatewayConfig, meter: GatewayMeter, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.backlog_bytes = 0
        self.on_stall: Callable[[], None] | None = None
        self._limits = limits
        self._meter = meter
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_reading_head = True
        self._is_message_complete = False
        self._is_deaf = False
        # `_head_bytes` came while a head was incomplete; `_named_bytes` are those of its target and headers that the
        # parser has told of. Only the latter see a head that comes whole in one piece.
        self._head_bytes = self._named_bytes = self._num_headers = 0
        self._num_taken = 0
        self._taken_at = self.loop.time()
        self._is_given_up = False

    # ── a connection comes and goes ─────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses the connection if there are too many."""
        self._client = ClientTransport(transport, self._lingers)
        super().connection_made(self._client)  # type: ignore[arg-type]
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        most = self._limits.max_connections
        if most is not None and len(self.connections) > most:
            self._meter.count(GatewayMetric.CONNECTIONS_REFUSED)
            message = f"all {most} connections of this server are in use; try again"
            self._refuse(TooManyConnections(message, retry_after_s=1.0))
            self.connections.discard(self)
            return
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all timers; the running answer hears of it."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self.on_stall = None

    # ── what a client sends ─────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, within the bounds."""
        if self._is_deaf:
            return
        is_discarding = self._has_answered and not self._is_message_complete
        if not is_discarding:
            self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as exc:
            match exc.__context__:
                case _Pipelined():
                    self._answer_is_last()
                case HttpError() as error:
                    self._refuse_junk(error)
                case _:
                    raise
        except httptools.HttpParserError:
            self._refuse_junk(HttpError("this is no HTTP/1.1 request; send one", HTTPStatus.BAD_REQUEST))
        else:
            # Empty lines between two requests are no head yet, but must not keep a connection open either.
            if self._is_reading_head or (self._has_answered and not is_discarding):
                self._watch_head(len(data))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as exc:
            rest = data[exc.args[0] :]
        # There is nothing to upgrade to, so the request counts as if it had not asked (Java's client asks for h2c with
        # every first POST). This parser takes the body for another protocol; another one reads it.
        self.cycle.keep_alive = False
        framing = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(_BodyOnly(self))
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n" + rest)

    @property
    def _has_answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def _answer_is_last(self) -> None:
        self._is_deaf = True
        self.cycle.keep_alive = False

    def _watch_head(self, num_new: int) -> None:
        self._head_bytes += num_new
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_junk(_head_too_large())
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        message = (
            f"the request's head was not complete within {self._limits.head_timeout_s:g} s; send it at once"
        )
        self._refuse_junk(HttpError(message, HTTPStatus.REQUEST_TIMEOUT))

    def _refuse_junk(self, error: HttpError) -> None:
        self._meter.count(GatewayMetric.HEADS_REFUSED)
        self._refuse(error)

    def _refuse(self, error: RequestError) -> None:
        """Answers `error`, unless an answer is on its way, and hears no more."""
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        is_running = self.cycle is not None and not self.cycle.response_complete
        if is_running and (self.cycle.response_started or self._is_message_complete):
            self._answer_is_last()
            return
        if is_running:  # its body turned out to be junk: to its handler the client has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = error_json(error)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error_headers(error),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self._linger()

    def _lingers(self) -> bool:
        """Whether the client is still sending a body, so that the connection closes a little later."""
        if self._linger_timer is not None or self._is_reading_head or self._is_message_complete:
            return False
        if self.transport.is_closing():
            return False
        self._linger()
        return True

    def _linger(self) -> None:
        # Closing at once would make the kernel reset the connection when more comes in, and the client lose the answer.
        self._is_deaf = True
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    # ── what the parser finds ───────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """A head begins."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise _Pipelined
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._is_reading_head, self._is_message_complete = True, False
        self._head_bytes = self._named_bytes = self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        """Part of the request's target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; behind a body it is a trailer, and dropped."""
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        if self._is_reading_head:
            super().on_header(name, value)

    def _count_head(self, num_new: int) -> None:
        self._named_bytes += num_new
        if self._named_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            raise _head_too_large()

    def on_headers_complete(self) -> None:
        """The request starts to run."""
        self._is_reading_head, self._head_bytes = False, 0
        self._stop_head_timer()
        if not _has_path(self.url):
            raise HttpError(
                "the request's target is no path; send one like /v1/models", HTTPStatus.BAD_REQUEST
            )
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = UnframedSend(self.cycle)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        """The request has been read, or the head of one that asks for an upgrade."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_message_complete = True

    # ── what a client takes ─────────────────────────────────────────────────────────────────────────────────

    @property
    def is_gone(self) -> bool:
        """Whether the client has left."""
        return self.transport.is_closing()

    @property
    def is_paused(self) -> bool:
        """Whether the client is behind, so that a write would wait."""
        return self.flow.write_paused

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were written and wait in this process for the client to take them."""
        size: int = self.transport.get_write_buffer_size()
        return size

    def write_part(self, body: bytes) -> None:
        """Writes a part of the running answer, as its cycle's `send` would; see `Connection.write_part`."""
        if not self.cycle.disconnected:
            self._client.write(b"%x\r\n%b\r\n" % (len(body), body) if self.cycle.chunked_encoding else body)

    async def until_writable(self) -> None:
        """Returns when the connection takes bytes again, or is gone."""
        await self.flow.drain()

    def give_up(self) -> None:
        """The client is too slow; see `Connection.give_up`."""
        self._meter.count(GatewayMetric.SLOW_CLIENTS)
        self._is_given_up = True
        self._taken_at = self.loop.time()
        self._answer_is_last()
        self.flow.resume_writing()

    def check(self, now: float) -> None:
        """Cuts the client if it has taken nothing of what waits for it for too long; called about every second."""
        num_taken = self._client.num_taken
        if self.buffered_bytes == 0 or num_taken != self._num_taken:
            self._num_taken, self._taken_at = num_taken, now
        elif self._is_given_up:
            if now - self._taken_at >= GRACE_S:
                self._reset()
        elif now - self._taken_at >= self._limits.client_stall_s:
            if (on_stall := self.on_stall) is not None:
                self.on_stall = None
                on_stall()
            else:  # its answer is written, all of it
                self._meter.count(GatewayMetric.SLOW_CLIENTS)
                self._reset()

    def _reset(self) -> None:
        """Breaks the connection off; the kernel forgets what it still holds for the client, too."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGERING)
        self.transport.abort()


class _BodyOnly:
    """What a parser tells of a request whose head another one has read: its body and end go to `protocol`."""

    def __init__(self, protocol: GatewayProtocol) -> None:
        self._has_begun = False
        self.on_header = protocol.on_header
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        """The request goes on, or a second one is pipelined."""
        if self._has_begun:
            raise _Pipelined
        self._has_begun = True


def _head_too_large() -> HttpError:
    message = f"the request's head has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers; send less"
    return HttpError(message, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)


def _has_path(target: bytes) -> bool:
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserInvalidURLError:
        return False
    return path is not None and path.isascii()
