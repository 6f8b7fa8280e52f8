"""What `tcp` puts on a connection after its hello (`tcp_hello`), as a stream (`tcp_stream`).

Frames: a push (fence, layers, target blocks, then the bytes of each block's layers), or a flush (fence), which the
receiver echoes once everything before it is in place or dropped.
"""

from __future__ import annotations

import socket
import struct
from typing import Annotated

import msgspec

from twinpool.kv_transfer.tcp_hello import SECRET_BYTES

FRAME = struct.Struct("!BQHHI")
"""Kind, fence, first layer, last layer, number of blocks; a push is followed by that many `BLOCK`s and the bytes."""

BLOCK = struct.Struct("!I")
ECHO = struct.Struct("!Q")
"""The fence of a flush, on its way back."""

PUSH = 1
FLUSH = 2

_KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds of silence before the system asks whether the other host still lives, between questions, and how many."""


class TcpAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a receiver listens, the secret that proves who was told so, and whether its connections are sealed."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    sealed: bool


def family(host: str) -> socket.AddressFamily:
    """The address family of a numeric address or a name: IPv6 only for numbers with colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def tune(connection: socket.socket) -> None:
    """What both ends set: no waiting for more to send, and an end to connections whose other host has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def skip(views: list[memoryview], index: int, num_bytes: int) -> int:
    """Moves past `num_bytes` of `views[index:]`, shortening the view in which they end; returns the new index."""
    while num_bytes:
        size = len(views[index])
        if num_bytes < size:
            views[index] = views[index][num_bytes:]
            return index
        num_bytes -= size
        index += 1
    return index
