"""The two ways in which the bytes of `tcp` cross a connection: as they are, or sealed.

Sealed bytes travel in records: their length, and that many bytes of ciphertext, each record under AES-256-GCM with the
connection's key for that direction and the number of the record as nonce. So a record that was changed, left out, sent
twice, put elsewhere or cut short is noticed before a byte of it is used. Keys are never used for two connections,
record numbers never twice (`tcp_hello` makes the keys).
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from twinpool.errors import ProtocolError, TransferError, TransportUnavailable

RECORD_BYTES = 256 << 10
"""The longest plain text of one record."""
MAX_VIEWS = 512
"""The most that one call hands to the system (IOV_MAX is 1,024 on Linux)."""
_TAG_BYTES = 16
_NONCE_BYTES = 12
_LENGTH = struct.Struct("!I")


class StreamEndedError(TransferError):
    """The other side closed, or the connection broke."""


class JunkError(ProtocolError):
    """What came is no part of this protocol."""


class Stream(Protocol):
    """One connection. One thread may send while another receives.

    The socket's descriptor stays in blocking mode; `num_sent` counts what it has taken.
    """

    num_sent: int

    def offer(self, views: Sequence[memoryview]) -> int:
        """Takes some bytes from the beginning of `views`, which it reads no more once it returns, and sends what the
        socket takes without waiting. Returns how many it took: they are sent now or with later calls. Raises OSError.
        """
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether it took bytes that are not sent yet."""
        ...

    def wait(self) -> None:
        """Waits until there is something to take. Raises StreamEndedError, JunkError, OSError."""
        ...

    def take_into(self, views: Sequence[memoryview]) -> int:
        """Fills the beginning of `views` with what is there; returns how much it was, perhaps 0. Never waits.

        Raises StreamEndedError, OSError.
        """
        ...


class PlainStream:
    """Bytes as they are: from the pool into the socket, from the socket into the pool."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self.num_sent = 0

    has_unsent = False

    def offer(self, views: Sequence[memoryview]) -> int:
        """See `Stream.offer`."""
        try:
            sent = self._connection.sendmsg(views[:MAX_VIEWS], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        self.num_sent += sent
        return sent

    def wait(self) -> None:
        """See `Stream.wait`."""
        self._readable.poll()

    def take_into(self, views: Sequence[memoryview]) -> int:
        """See `Stream.take_into`."""
        try:
            num_bytes = self._connection.recvmsg_into(views[:MAX_VIEWS], 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return 0
        if num_bytes == 0:
            raise StreamEndedError
        return num_bytes


class SealedStream:
    """Bytes in records. What is offered is copied by sealing it, what is taken by opening it."""

    def __init__(self, connection: socket.socket, key_out: bytes, key_in: bytes) -> None:
        """Raises TransportUnavailable if this machine has no `cryptography`."""
        try:
            # Not at the top: only sealed links pay for it.
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as exc:
            raise TransportUnavailable(
                f"transport tcp: sealing needs the package cryptography ({exc}); pip install cryptography, or "
                "use --kv-encryption off on a network that you trust"
            ) from exc
        self._connection = connection
        self._seal, self._open, self._invalid_tag = AESGCM(key_out), AESGCM(key_in), InvalidTag
        self._num_sealed = self._num_opened = 0
        self._record_out = memoryview(bytearray(_LENGTH.size + RECORD_BYTES + _TAG_BYTES))
        self._unsent = self._record_out[:0]
        self._record_in = memoryview(bytearray(RECORD_BYTES + _TAG_BYTES))
        self._plain = memoryview(bytearray(RECORD_BYTES))
        self._untaken = self._plain[:0]
        self.num_sent = 0

    @property
    def has_unsent(self) -> bool:
        """See `Stream.has_unsent`."""
        return bool(self._unsent)

    def offer(self, views: Sequence[memoryview]) -> int:
        """See `Stream.offer`. Takes nothing before the last record has gone."""
        taken = 0
        if not self._unsent and views:
            plain = views[0][:RECORD_BYTES]
            taken = len(plain)
            length = _LENGTH.pack(taken + _TAG_BYTES)
            end = _LENGTH.size + taken + _TAG_BYTES
            self._record_out[: _LENGTH.size] = length
            self._seal.encrypt_into(
                _nonce(self._num_sealed), plain, length, self._record_out[_LENGTH.size : end]
            )
            self._num_sealed += 1
            self._unsent = self._record_out[:end]
        try:
            sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return taken
        self._unsent = self._unsent[sent:]
        self.num_sent += sent
        return taken

    def wait(self) -> None:
        """See `Stream.wait`. Reads and opens a whole record."""
        if self._untaken:
            return
        length = read(self._connection, _LENGTH.size)
        (num_bytes,) = _LENGTH.unpack(length)
        if not _TAG_BYTES < num_bytes <= RECORD_BYTES + _TAG_BYTES:
            raise JunkError(f"a sealed record of {num_bytes} bytes")
        sealed, plain = self._record_in[:num_bytes], self._plain[: num_bytes - _TAG_BYTES]
        _fill(self._connection, sealed)
        try:
            self._open.decrypt_into(_nonce(self._num_opened), sealed, length, plain)
        except self._invalid_tag as exc:
            raise JunkError("a sealed record that was changed on its way, or is not the next one") from exc
        self._num_opened += 1
        self._untaken = plain

    def take_into(self, views: Sequence[memoryview]) -> int:
        """See `Stream.take_into`."""
        taken = 0
        for view in views:
            part = self._untaken[: len(view)]
            view[: len(part)] = part
            self._untaken = self._untaken[len(part) :]
            taken += len(part)
            if not self._untaken:
                break
        return taken


def take(stream: Stream, num_bytes: int) -> bytes:
    """The next `num_bytes` bytes, waited for. Raises StreamEndedError, JunkError, OSError."""
    whole = bytearray(num_bytes)
    rest = memoryview(whole)
    while rest:
        stream.wait()
        rest = rest[stream.take_into([rest]) :]
    return bytes(whole)


def give(stream: Stream, connection: socket.socket, data: bytes) -> None:
    """Sends all of `data`, over `connection`, which is the stream's. Raises OSError."""
    writable = select.poll()
    writable.register(connection, select.POLLOUT)
    rest = memoryview(data)
    while rest or stream.has_unsent:
        writable.poll()
        rest = rest[stream.offer([rest] if rest else []) :]


def read(connection: socket.socket, num_bytes: int) -> bytes:
    """The next `num_bytes` bytes of the bare connection, waited for. Raises StreamEndedError, OSError."""
    whole = bytearray(num_bytes)
    _fill(connection, memoryview(whole))
    return bytes(whole)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        if not (num_bytes := connection.recv_into(view)):
            raise StreamEndedError
        view = view[num_bytes:]


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")
