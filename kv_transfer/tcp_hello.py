"""How a connection of `tcp` begins: each side proves that it knows the receiver's secret, and says nothing of it.

::

    sender                                   receiver
    hello: magic, nonce, name        ──►
                                     ◄──     welcome: nonce, proof
    proof                            ──►

Proofs and keys are keyed hashes (BLAKE2b) of both nonces, the name, and whether the connection is sealed; so none of
them fits another connection, and nobody in between can have it unsealed. The secret itself came with the receiver's
address, over the workers' own encrypted channel.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from hashlib import blake2b

from twinpool.kv_transfer.tcp_stream import (
    JunkError,
    PlainStream,
    SealedStream,
    Stream,
    StreamEndedError,
    read,
)

MAGIC = b"TWINKV02"
SECRET_BYTES = 32
MAX_NAME_BYTES = 256
HELLO_LIMIT_S = 5.0

_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"!8s{_NONCE_BYTES}sH")
"""Magic, nonce, length of the writer's name, which follows."""
_WELCOME = struct.Struct(f"!{_NONCE_BYTES}s{_PROOF_BYTES}s")


def greet(connection: socket.socket, secret: bytes, name: str, sealed: bool) -> Stream:
    """The sender's side: the stream to a receiver that knows `secret`. The socket's timeout bounds each wait.

    Raises:
        JunkError: the other side does not know the secret.
        StreamEndedError: it turned this one away.
        OSError: the connection broke.
    """
    nonce, writer = secrets.token_bytes(_NONCE_BYTES), name.encode()
    connection.sendall(_HELLO.pack(MAGIC, nonce, len(writer)) + writer)
    other_nonce, proof = _WELCOME.unpack(read(connection, _WELCOME.size))
    bond = _Bond(secret, nonce, other_nonce, writer, sealed)
    if not hmac.compare_digest(proof, bond.hash("receiver proves")):
        raise JunkError("who answers there does not know the receiver's secret")
    connection.sendall(bond.hash("sender proves"))
    return bond.stream(connection, "to receiver", "to sender")


def welcome(connection: socket.socket, secret: bytes, sealed: bool) -> tuple[str, Stream]:
    """The receiver's side: the writer's name, and the stream to it, within `HELLO_LIMIT_S`.

    Raises:
        JunkError: it is no sender, or does not know `secret`.
        StreamEndedError: it left.
        OSError: the connection broke, or it took too long (TimeoutError).
    """
    deadline = time.monotonic() + HELLO_LIMIT_S
    magic, other_nonce, length = _HELLO.unpack(_read_by(connection, _HELLO.size, deadline))
    if magic != MAGIC or length > MAX_NAME_BYTES:
        raise JunkError("it did not start with a hello")
    writer = _read_by(connection, length, deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    bond = _Bond(secret, other_nonce, nonce, writer, sealed)
    connection.sendall(_WELCOME.pack(nonce, bond.hash("receiver proves")))
    if not hmac.compare_digest(_read_by(connection, _PROOF_BYTES, deadline), bond.hash("sender proves")):
        raise JunkError("it does not know the secret of this receiver")
    return writer.decode(errors="replace"), bond.stream(connection, "to sender", "to receiver")


class _Bond:
    """What both sides know of one connection."""

    def __init__(self, secret: bytes, nonce: bytes, other_nonce: bytes, writer: bytes, sealed: bool) -> None:
        self._secret = secret
        self._sealed = sealed
        self._told = bytes([sealed]) + nonce + other_nonce + writer

    def hash(self, purpose: str) -> bytes:
        """A value for this purpose (at most 16 bytes) that only these two can compute."""
        return blake2b(
            self._told, key=self._secret, person=purpose.encode(), digest_size=_PROOF_BYTES
        ).digest()

    def stream(self, connection: socket.socket, key_out: str, key_in: str) -> Stream:
        """The connection as a stream."""
        if not self._sealed:
            return PlainStream(connection)
        return SealedStream(connection, self.hash(key_out), self.hash(key_in))


def _read_by(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := connection.recv(num_bytes - len(parts))):
            raise StreamEndedError
        parts += part
    return parts
