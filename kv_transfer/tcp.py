"""`tcp`, the receiving end: bytes go from the socket straight into the pool.

One thread accepts, one serves each connection; neither a model step nor the event loop ever waits for a
socket. What does not begin with the right hello is closed and counted, what comes under a fence that is
not expected is read and thrown away.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from twinpool.errors import ConfigError
from twinpool.junk_log import JunkLog
from twinpool.kv_transfer.connector import KVRegion, LocalEnd
from twinpool.kv_transfer.intake import TwoSidedReceiver
from twinpool.kv_transfer.tcp_hello import SECRET_BYTES, welcome
from twinpool.kv_transfer.tcp_stream import JunkError, Stream, StreamEndedError, give, take
from twinpool.kv_transfer.tcp_wire import BLOCK, ECHO, FLUSH, FRAME, PUSH, TcpAddress, family, skip, tune

log = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.1
_MAX_CONNECTIONS = 1024
_SCRATCH_BYTES = 256 << 10


class TcpReceiver(TwoSidedReceiver):
    """Listens on this worker's host, on a port that the system chooses."""

    name = "tcp"

    def __init__(self, region: KVRegion, end: LocalEnd, *, seal: bool) -> None:
        """Takes KV encrypted if `seal`, else as it is. Raises ConfigError if the host cannot be bound."""
        super().__init__(region)
        try:
            self._listener = socket.create_server((end.host, 0), family=family(end.host), backlog=128)
        except OSError as exc:
            raise ConfigError(f"KV transfer by tcp cannot listen on host {end.host!r}: {exc}") from exc
        port = self._listener.getsockname()[1]
        self._address = TcpAddress(end.host, port, secrets.token_bytes(SECRET_BYTES), seal)
        self._junk_log = JunkLog(log)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._acceptor.start()

    def address(self) -> bytes:
        """Host, port and secret, and whether connections are sealed."""
        return msgspec.msgpack.encode(self._address)

    async def close(self) -> None:
        """Closes the port and every connection, and waits for their threads, which end at once."""
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        _shut(self._listener)
        for connection in connections:
            _shut(connection)
        for thread in (self._acceptor, *connections.values()):
            thread.join()
        self._listener.close()
        self._intake.drop_all()

    # ── threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                log.exception("accepting a KV connection failed")
                time.sleep(_ACCEPT_PAUSE_S)  # out of file descriptors, most likely
                continue
            with self._lock:
                if self._closed or len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="kv-tcp-receive", daemon=True
                )
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        is_known = False
        try:
            tune(connection)
            writer, stream = welcome(connection, self._address.secret, self._address.sealed)
            is_known = True
            connection.settimeout(None)
            while True:
                self._read_frame(connection, stream, writer)
        except StreamEndedError:
            pass  # the sender has closed it, as it may at any time
        except (JunkError, OSError) as exc:
            if is_known and isinstance(exc, OSError):
                log.warning("a KV connection broke: %s", exc)
            else:
                with self._lock:
                    self.num_junk += 1
                self._junk_log.say(f"a connection to the KV port was closed: {exc}")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _read_frame(self, connection: socket.socket, stream: Stream, writer: str) -> None:
        kind, fence, first, last, count = FRAME.unpack(take(stream, FRAME.size))
        if kind == FLUSH:
            give(stream, connection, ECHO.pack(fence))
            return
        layout = self._region.layout
        if kind != PUSH or not first < last <= layout.num_layers or count > self._region.num_blocks:
            raise JunkError(f"{writer} sent a frame that makes no sense: {(kind, fence, first, last, count)}")
        block_ids = [block for (block,) in BLOCK.iter_unpack(take(stream, BLOCK.size * count))]
        views: list[memoryview] = []
        for block in block_ids:
            if block >= self._region.num_blocks:
                raise JunkError(f"{writer} names block {block} of a pool of {self._region.num_blocks}")
            start, length = layout.layer_range(block, first, last)
            views.append(self._region.memory[start : start + length])
        self._read_blocks(stream, writer, fence, block_ids, views)

    def _read_blocks(
        self, stream: Stream, writer: str, fence: int, block_ids: Sequence[int], views: list[memoryview]
    ) -> None:
        """Fills `views`; looks the fence up again for every piece, under the lock that a cancellation takes."""
        left = sum(len(view) for view in views)
        scratch = memoryview(bytearray(0))
        index = 0
        while left:
            stream.wait()
            with self._intake.lock:
                if not scratch and not self._intake.admits(fence, writer, block_ids):
                    self._intake.num_dropped += 1
                    scratch = memoryview(bytearray(_SCRATCH_BYTES))
                num_bytes = stream.take_into([scratch[:left]] if scratch else views[index:])
                if not scratch:
                    self._intake.landed(fence, num_bytes)
            left -= num_bytes
            if not scratch:
                index = skip(views, index, num_bytes)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was faster
