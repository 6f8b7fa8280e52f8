"""Reading a request's body: bounded in bytes, in time, and over all requests together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TypeVar

from fastapi import Request

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.error_answers import HttpError
from twinpool.errors import BodyTooLarge, QueueFull

INLINE_BYTES = 64 << 10
"""Bodies up to here are parsed on the event loop, in about a millisecond; longer ones in a thread."""
SLOWEST_BYTES_PER_S = 64 << 10
"""A body may take `body_timeout_s`, and the time that its bytes take at this rate."""
BODIES_AT_ONCE = 16
"""Bodies of the largest size that may be held at the same time."""
RETRY_AFTER_S = 1.0
_JSON = "application/json"

Parsed = TypeVar("Parsed")


class BodyReader:
    """Reads bodies, and counts the bytes of those that are still held in memory."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._limits = limits
        self._most_held = limits.max_body_bytes * BODIES_AT_ONCE
        self.num_held = 0

    @contextmanager
    def reading(self) -> Iterator[BodyInHand]:
        """A body's share of the memory for bodies, until the block ends."""
        body = BodyInHand(self, self._limits)
        try:
            yield body
        finally:
            self.num_held -= body.size

    def hold(self, num_bytes: int) -> None:
        """`num_bytes` more are in memory. Raises QueueFull if that is too many for now."""
        self.num_held += num_bytes
        if self.num_held > self._most_held:
            message = f"{self._most_held} bytes of requests are being read already; send this one again later"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)


class BodyInHand:
    """The body of one request. `size` is what was read of it."""

    def __init__(self, reader: BodyReader, limits: GatewayConfig) -> None:
        self._reader = reader
        self._limits = limits
        self.size = 0

    async def parse(self, request: Request, parse: Callable[[bytes], Parsed]) -> Parsed:
        """What `parse` makes of all of it, perhaps in a thread.

        Raises:
            HttpError: 415, it is a form, or compressed. JSON is read whatever its type says: curl calls it a form.

        And what `read` and `parse` raise.
        """
        _refuse_unreadable(request)
        data = await self.read(request)
        _refuse_form(request, data)
        return parse(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(parse, data)

    async def read(self, request: Request) -> bytes:
        """All of it.

        Raises:
            BodyTooLarge: it has more than `max_body_bytes`.
            HttpError: 408, it comes too slowly.
            QueueFull: too much is being read at the same time.
            ClientDisconnect: the client has left.
        """
        limit = self._limits.max_body_bytes
        declared = request.headers.get("content-length", "")
        too_large = BodyTooLarge(f"the body is longer than {limit} bytes; send a shorter prompt")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        parts: list[bytes] = []
        started_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s) as timeout:
                async for part in request.stream():
                    self.size += len(part)
                    self._reader.hold(len(part))
                    if self.size > limit:
                        raise too_large
                    parts.append(part)
                    allowed_s = self._limits.body_timeout_s + self.size / SLOWEST_BYTES_PER_S
                    timeout.reschedule(started_at + allowed_s)
        except TimeoutError:
            message = f"the body comes too slowly ({self.size} bytes so far); send it at once"
            raise HttpError(message, HTTPStatus.REQUEST_TIMEOUT) from None
        return b"".join(parts)


def _refuse_unreadable(request: Request) -> None:
    """Raises HttpError for what is no JSON whatever is in it, before it is read."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise _unsupported(f"the body's content-encoding is {encoding[:80]!r}; send it as it is")
    if (media_type := _media_type(request)).startswith("multipart/"):
        raise _unsupported(_send_json(media_type))


def _refuse_form(request: Request, data: bytes) -> None:
    """Raises HttpError for what neither says that it is JSON nor begins like an object."""
    media_type = _media_type(request)
    says_json = media_type in ("", _JSON) or media_type.endswith("+json")
    if not says_json and data and not data.lstrip().startswith(b"{"):
        raise _unsupported(_send_json(media_type))


def _media_type(request: Request) -> str:
    """What the request says that its body is, without parameters; empty if it says nothing."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _send_json(media_type: str) -> str:
    return f"the body's content-type is {media_type[:80]!r}; send a JSON object, with content-type {_JSON}"


def _unsupported(message: str) -> HttpError:
    return HttpError(message, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
