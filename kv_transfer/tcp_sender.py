"""`tcp`, the sending end: bytes go from the pinned pool straight to the socket.

The queue holds block ids only, and is bounded by the blocks that its owner keeps pinned. One thread
writes, one reads the echoes and notices at once when the receiver dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import socket
import termios
import threading
from array import array
from collections import deque
from contextlib import suppress

import msgspec

from twinpool.errors import PeerLost, TransportUnavailable
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd, PushReport
from twinpool.kv_transfer.plan import layer_group
from twinpool.kv_transfer.pushes import PushLog, until_delivered
from twinpool.kv_transfer.tcp_hello import greet
from twinpool.kv_transfer.tcp_stream import MAX_VIEWS, JunkError, Stream, StreamEndedError, take
from twinpool.kv_transfer.tcp_wire import BLOCK, ECHO, FLUSH, FRAME, PUSH, TcpAddress, skip, tune

log = logging.getLogger(__name__)

STOP_LIMIT_S = 0.5
"""How long `stop` waits for bytes that are on their way. Those of a slow link, or for a frozen receiver, take longer:
the receiver drops them, for it cancels the fence before it uses the blocks again."""
_MIN_PUSH_BYTES = 128 << 10
_CONNECT_TIMEOUT_S = 5.0
_POLL_MS = 500
_ZEROS = memoryview(bytes(256 << 10))

_Item = tuple[int, BlockRange | None]
"""A fence with the ranges to push, or None to flush."""


def unacknowledged(connection: socket.socket) -> int:
    """Bytes that the connection has taken and the other host has not acknowledged; 0 of a closed one, or where the
    system does not tell."""
    count = array("i", [0])
    with suppress(OSError, ValueError):
        fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    return count[0]


class TcpSender:
    """A connection to one receiver. Open it with `connect`."""

    name = "tcp"

    def __init__(self, connection: socket.socket, stream: Stream, peer: str, region: KVRegion) -> None:
        self.layer_group = layer_group(region.layout, _MIN_PUSH_BYTES, region.layout.num_layers)
        self._connection = connection
        self._stream = stream
        self._peer = peer
        self._region = region
        self._loop = asyncio.get_running_loop()
        self._log = PushLog()
        self._queue: deque[_Item] = deque()
        self._wake = threading.Condition()
        self._reading_source = threading.Lock()
        self._flushes: dict[int, deque[asyncio.Future[None]]] = {}
        self._draining: set[asyncio.Task[None]] = set()
        self._lost: str | None = None
        self._threads = [
            threading.Thread(target=self._write, name="kv-tcp-send", daemon=True),
            threading.Thread(target=self._read_echoes, name="kv-tcp-echo", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    async def connect(cls, address: bytes, region: KVRegion, end: LocalEnd, *, seal: bool) -> TcpSender:
        """Connects and says hello.

        Raises:
            PeerLost: nothing listens at `address`, or not the receiver that has this secret.
            TransportUnavailable: `address` is none of this transport's, or not sealed though it must be (`seal`).
        """
        try:
            where = msgspec.msgpack.decode(address, type=TcpAddress)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            raise TransportUnavailable(f"transport tcp: not an address of a receiver: {exc}") from exc
        peer = f"{where.host}:{where.port}"
        if seal and not where.sealed:
            raise TransportUnavailable(
                f"transport tcp: the receiver at {peer} takes KV unencrypted, which --kv-encryption forbids here; give "
                "both workers the same --kv-encryption"
            )

        def dial() -> tuple[socket.socket, Stream]:
            connection = socket.create_connection((where.host, where.port), timeout=_CONNECT_TIMEOUT_S)
            try:
                tune(connection)
                stream = greet(connection, where.secret, end.writer, where.sealed)
                connection.settimeout(None)
            except BaseException:
                connection.close()
                raise
            return connection, stream

        try:
            connection, stream = await asyncio.to_thread(dial)
        except (OSError, JunkError, StreamEndedError) as exc:
            raise PeerLost(f"no KV receiver answers at {peer}: {exc}") from exc
        return cls(connection, stream, peer, region)

    @property
    def lost(self) -> str | None:
        """Set as soon as the connection ends, or nothing has moved for too long."""
        return self._lost

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Queues the ranges; their bytes stay where they are until the socket takes them."""
        if self._log.begin(fence, blocks.num_bytes(self._region.layout)):
            self._enqueue(fence, blocks)

    async def finish(self, fence: int) -> PushReport:
        """Waits until the receiver has everything."""
        self._log.begin(fence, 0)  # what the flush takes is transfer time too
        await self._delivered(fence)
        self._log.end(fence)
        return self._log.finish(fence)

    async def stop(self, fence: int) -> None:
        """Sends nothing more of `fence`; waits at most `STOP_LIMIT_S` until the receiver has read what was on its way.

        A receiver that takes nothing any more loses the link, later.
        """
        self._log.stop(fence)
        with self._reading_source:
            pass  # a read of the source that was under way has ended
        draining = self._loop.create_task(self._drained(fence))
        self._draining.add(draining)
        draining.add_done_callback(self._draining.discard)
        await asyncio.wait((draining,), timeout=STOP_LIMIT_S)

    async def close(self) -> None:
        """Closes the connection; waiting flushes raise PeerLost."""
        self._lose("the link was closed")
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _enqueue(self, fence: int, blocks: BlockRange | None) -> None:
        with self._wake:
            if self._lost is not None:
                raise PeerLost(f"the KV link to {self._peer} is lost: {self._lost}")
            self._queue.append((fence, blocks))
            self._wake.notify()

    async def _drained(self, fence: int) -> None:
        with suppress(PeerLost):
            await self._delivered(fence)

    async def _delivered(self, fence: int) -> None:
        """Returns when the receiver is through with all that was pushed before. Raises PeerLost, and is lost then."""
        try:
            # Not what the socket has taken: megabytes of that may be on their way over a slow link.
            await until_delivered(
                self._flush(fence),
                lambda: self._stream.num_sent - unacknowledged(self._connection),
                self._peer,
            )
        except PeerLost as exc:
            self._lose(str(exc))
            with self._reading_source:
                raise

    def _flush(self, fence: int) -> asyncio.Future[None]:
        """Event loop: a future that is done when the receiver is through with all that was pushed before."""
        delivered: asyncio.Future[None] = self._loop.create_future()
        self._flushes.setdefault(fence, deque()).append(delivered)
        try:
            self._enqueue(fence, None)
        except PeerLost as exc:
            self._settle(fence, exc)
        return delivered

    # ── threads ─────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._queue and self._lost is None:
                        self._wake.wait()
                    if self._lost is not None:
                        return
                    fence, blocks = self._queue.popleft()
                if blocks is None:
                    self._send_all([memoryview(FRAME.pack(FLUSH, fence, 0, 0, 0))], None)
                elif not self._log.is_stopped(fence):
                    self._send_blocks(fence, blocks)
        except OSError as exc:
            self._lose(str(exc))

    def _send_blocks(self, fence: int, blocks: BlockRange) -> None:
        layout = self._region.layout
        first, last = blocks.first_layer, blocks.last_layer
        head = FRAME.pack(PUSH, fence, first, last, len(blocks.target_blocks))
        views = [memoryview(head + b"".join(map(BLOCK.pack, blocks.target_blocks)))]
        for block in blocks.source_blocks:
            start, length = layout.layer_range(block, first, last)
            views.append(self._region.memory[start : start + length])
        self._send_all(views, fence)
        self._log.end(fence)

    def _send_all(self, views: list[memoryview], fence: int | None) -> None:
        """Sends `views`, a header and blocks of the source pool.

        If `fence` is stopped meanwhile, a frame that has not begun is left out, one that has is filled up
        with zeros.
        """
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        index, has_begun = 0, False
        while index < len(views) or self._stream.has_unsent:
            writable.poll(_POLL_MS)
            with self._reading_source:
                if fence is not None and self._log.is_stopped(fence):
                    if not has_begun:
                        return
                    rest = sum(map(len, views[max(index, 1) :]))
                    views = [*views[index:1], *_zeros(rest)]
                    index, fence = 0, None
                if self._lost is not None:
                    raise ConnectionAbortedError(self._lost)
                taken = self._stream.offer(views[index : index + MAX_VIEWS])
            has_begun = has_begun or taken > 0
            index = skip(views, index, taken)

    def _read_echoes(self) -> None:
        try:
            while True:
                (fence,) = ECHO.unpack(take(self._stream, ECHO.size))
                self._loop.call_soon_threadsafe(self._settle, fence, None)
        except StreamEndedError:
            self._lose("the receiver closed the connection")
        except (OSError, JunkError) as exc:
            self._lose(str(exc))

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def _lose(self, reason: str) -> None:
        """Any thread: nothing is sent any more, and whoever waits gets PeerLost."""
        with self._wake:
            if self._lost is not None:
                return
            self._lost = reason
            self._queue.clear()
            self._wake.notify_all()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as exc:
            log.debug("the connection to %s was closed already: %s", self._peer, exc)
        self._loop.call_soon_threadsafe(self._fail_flushes)

    def _fail_flushes(self) -> None:
        for fence, waiting in list(self._flushes.items()):
            for _ in range(len(waiting)):
                self._settle(fence, PeerLost(f"the KV link to {self._peer} is lost: {self._lost}"))

    def _settle(self, fence: int, error: PeerLost | None) -> None:
        """Event loop: the oldest flush of `fence` is over."""
        waiting = self._flushes.get(fence)
        if not waiting:
            return
        delivered = waiting.popleft()
        if not waiting:
            del self._flushes[fence]
        if delivered.done():
            return
        if error is None:
            delivered.set_result(None)
        else:
            delivered.set_exception(error)
            delivered.exception()  # nobody may be waiting: mark it as seen


def _zeros(num_bytes: int) -> list[memoryview]:
    whole, rest = divmod(num_bytes, len(_ZEROS))
    return [*[_ZEROS] * whole, _ZEROS[:rest]] if rest else [_ZEROS] * whole
