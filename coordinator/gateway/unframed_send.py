"""Answers to clients that speak HTTP/1.0."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class UnframedSend:
    """ASGI's `send` for a client that speaks HTTP/1.0, which knows no chunks: an answer whose length its head does not
    tell ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send_framed = cycle.send
        self._is_framed = True

    async def __call__(self, message: Any) -> None:
        """Writes one part of the answer."""
        cycle = self._cycle
        is_head, headers = message["type"] == "http.response.start", message.get("headers", ())
        if is_head:
            self._is_framed = any(name == b"content-length" for name, _ in headers)
        if self._is_framed:
            await self._send_framed(message)
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if is_head:
            self._begin(message["status"], headers)
        else:
            cycle.transport.write(message.get("body", b""))
            if not message.get("more_body", False):
                self._end()

    def _begin(self, status: int, headers: Any) -> None:
        self._cycle.response_started = True
        lines = [name + b": " + value + b"\r\n" for name, value in (*self._cycle.default_headers, *headers)]
        self._cycle.transport.write(STATUS_LINE[status] + b"".join(lines) + b"connection: close\r\n\r\n")

    def _end(self) -> None:
        self._cycle.response_complete = True
        self._cycle.message_event.set()
        self._cycle.transport.close()
        self._cycle.on_response()
