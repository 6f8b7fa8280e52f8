"""What the writer of an answer knows of the connection that carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

CONNECTION = "twinpool.connection"
"""Where a request's scope holds its `Connection`."""


class Connection(Protocol):
    """One client's connection.

    `backlog_bytes` is set by the writer: what it holds back while `is_paused`. `on_stall` is set by the writer and
    called, once, when the client has taken nothing for too long.
    """

    backlog_bytes: int
    on_stall: Callable[[], None] | None

    @property
    def is_gone(self) -> bool:
        """Whether the client has left, which the writer may not have noticed yet."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the client is behind, so that a write would wait."""
        ...

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were written and wait in this process for the client to take them."""
        ...

    def write_part(self, body: bytes) -> None:
        """Writes the next part of a running answer that is streamed and whose head is written, without waiting. Drops
        it if the client has left."""
        ...

    async def until_writable(self) -> None:
        """Returns when the connection takes bytes again, or is gone."""
        ...

    def give_up(self) -> None:
        """The client is too slow. The next write does not wait, and the connection closes behind it; if the client
        does not take that either, the connection is broken off."""
        ...
