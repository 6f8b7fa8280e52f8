"""HTTP/1.1 as a client that measures speaks it: a C parser, one exchange at a time on a connection.

What it does per piece of an answer is little, because it may share the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from twinpool.config import require

CONNECT_LIMIT_S = 10.0
_SOON_S = 0.1
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. `prefix` is what stands before every path, without a slash at its end."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, setting: str, url: str) -> Address:
        """Reads ``http[s]://HOST[:PORT][/PREFIX]``. Raises ConfigError, which calls it `setting`."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        ok = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and port != -1 and not parts.query
        require(setting, url, ok, "like http://127.0.0.1:8000 or https://host")
        return cls(
            host=parts.hostname or "",
            port=port or _DEFAULT_PORTS[parts.scheme],
            is_tls=parts.scheme == "https",
            prefix=parts.path.rstrip("/"),
        )

    def request(self, method: str, path: str, headers: Iterable[str] = (), body: bytes = b"") -> bytes:
        """The bytes of a request. `headers` are whole lines."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {name}:{self.port}", *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def tls_context(self, *, is_verified: bool = True) -> ssl.SSLContext | None:
        """For `connect`: None without TLS. Not verified, any certificate will do."""
        if not self.is_tls:
            return None
        context = ssl.create_default_context()
        if not is_verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Answer:
    """What comes back for one request. Subclasses take its body.

    `over` is called once: when the answer `is_whole`, or when it cannot become that any more.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By lower-case name."""
        self.is_whole = False

    def take(self, data: bytes, at: float) -> None:
        """The next part of the body, which arrived at `at` (monotonic clock, seconds)."""
        raise NotImplementedError

    def over(self) -> None:
        """Nothing more will come."""
        raise NotImplementedError


class Connection(asyncio.Protocol):
    """One connection. It carries one exchange at a time, and the next one once the answer is over."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._at = 0.0
        self._has_head = False
        self.is_open = False
        """Whether another request may be sent on it, once it is idle."""
        self._num_asked = 0
        self._has_heard = False
        self._was_idle = False
        self._opened_at = 0.0

    def ask(self, request: bytes, answer: Answer) -> None:
        """Sends `request`; `answer` gets what comes back. The connection must be open and idle."""
        assert self._transport is not None, "open"
        assert self._answer is None, "idle"
        self._answer = answer
        self._has_head = self._has_heard = False
        self._was_idle = self._num_asked > 0 or time.monotonic() - self._opened_at > _SOON_S
        self._num_asked += 1
        self._transport.write(request)

    def abort(self) -> None:
        """Closes it at once; an answer that is not over ends here. Calling it twice is fine."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio
        self.is_open = True
        self._opened_at = time.monotonic()

    def peer(self) -> tuple[str, int] | None:
        """The other end's numeric address and port."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return None if name is None else (name[0], name[1])

    @property
    def was_stale(self) -> bool:
        """Whether it was closed, by the other end, without a word on the last request, before which it was idle: that
        end had most likely given it up, and never saw the request."""
        return self._was_idle and not self.is_open and not self._has_heard

    def data_received(self, data: bytes) -> None:
        self._at = time.monotonic()
        self._has_heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()  # not an answer in HTTP: it stays unfinished

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        answer = self._answer
        if answer is not None and exc is None and self._has_head:
            # Without a length the end of the connection is the end of the answer.
            answer.is_whole = not {"content-length", "transfer-encoding"} & answer.headers.keys()
        self._end()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.take(data, self._at)

    def on_message_complete(self) -> None:
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._answer is not None:
            self._answer.is_whole = True
        self._end()

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.over()


async def connect(
    address: Address, tls: ssl.SSLContext | None = None, limit_s: float = CONNECT_LIMIT_S
) -> Connection:
    """A new connection. Raises OSError (not reachable, no TLS) and TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit_s):
        _, connection = await loop.create_connection(Connection, address.host, address.port, ssl=tls)
    return connection
