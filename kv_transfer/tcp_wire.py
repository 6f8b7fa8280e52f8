"""What `tcp` puts on a connection.

A connection starts with a hello (the receiver's secret token, the writer's name) and carries frames after
it: a push (fence, layers, target blocks, then the bytes of each block's layers), or a flush (fence),
which the receiver echoes once everything before it is in place or dropped.
"""

from __future__ import annotations

import socket
import struct

import msgspec

MAGIC = b"TWINKV01"
TOKEN_BYTES = 16
MAX_NAME_BYTES = 256

HELLO = struct.Struct(f"!8s{TOKEN_BYTES}sH")
"""Magic, token, length of the writer's name, which follows."""

FRAME = struct.Struct("!BQHHI")
"""Kind, fence, first layer, last layer, number of blocks; a push is followed by that many `BLOCK`s and the bytes."""

BLOCK = struct.Struct("!I")
ECHO = struct.Struct("!Q")
"""The fence of a flush, on its way back."""

PUSH = 1
FLUSH = 2

_KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds of silence before the system asks whether the other host still lives, between questions, and how many."""


class TcpAddress(msgspec.Struct, frozen=True):
    """Where a receiver listens, and the token that proves who was told so."""

    host: str
    port: int
    token: bytes


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
