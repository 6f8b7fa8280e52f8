"""Control messages over ZeroMQ: the only module that knows zmq.

A channel hands each message that arrives to one callback, on the event loop; sending never blocks. The identity of a
connection is ``worker_id/incarnation``: a process that comes back has a new one, so it is never mistaken for the old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import zmq

from twinpool.errors import ConfigError, PeerLost, ProtocolError
from twinpool.messages import MAX_MESSAGE_BYTES, Message, decode, encode

MAX_QUEUED_MESSAGES = 100_000

OnMessage = Callable[[str, Message], None]
OnJunk = Callable[[str, ProtocolError], None]


class Channel:
    """One ZeroMQ socket on the running event loop. Use `RouterChannel` or `DealerChannel`.

    `on_message(identity, message)` is called for each message that decodes, `on_junk(identity, error)` for each that
    does not; neither may block or raise. Identity is "" on a dealer, whose only peer is the one it connected to.
    """

    def __init__(self, kind: int, on_message: OnMessage, on_junk: OnJunk) -> None:
        self._on_message = on_message
        self._on_junk = on_junk
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._drain_scheduled = False
        self._closed = False

    def _listen(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        # zmq's file descriptor is edge-triggered: any call on the socket may swallow the edge, so look again after.
        if not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        while not self._closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            identity = frames[0].decode("utf-8", "replace") if len(frames) > 1 else ""
            try:
                message = decode(frames[-1])
            except ProtocolError as exc:
                self._on_junk(identity, exc)
            else:
                self._on_message(identity, message)

    def _send(self, frames: list[bytes], peer: str) -> None:
        if self._closed:
            raise PeerLost(f"the channel to {peer} is closed")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            raise PeerLost(f"no message reaches {peer}: {exc}") from exc
        self._schedule_drain()

    def close(self) -> None:
        """Sends what is queued (for at most 0.2 s) and releases the socket. Calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class RouterChannel(Channel):
    """The bound side: many peers, told apart by identity."""

    def __init__(
        self, bind: str, on_message: OnMessage, on_junk: OnJunk, *, setting: str = "--control"
    ) -> None:
        """Binds to `bind`; a port of ``*`` takes any free one. `setting` is the flag that an error names.

        Raises:
            ConfigError: the address cannot be bound.
        """
        super().__init__(zmq.ROUTER, on_message, on_junk)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(
                f"{setting}: {bind!r} cannot be bound: {exc}; choose another or a free port"
            ) from exc
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._listen()

    def send(self, identity: str, message: Message) -> None:
        """Queues `message` for the peer.

        Raises:
            PeerLost: no such peer is connected, or its queue is full.
        """
        self._send([identity.encode(), encode(message)], identity)


class DealerChannel(Channel):
    """The connecting side: one peer."""

    def __init__(self, connect: str, identity: str, on_message: OnMessage, on_junk: OnJunk) -> None:
        """Connects to `connect` (in the background) under `identity`.

        Raises:
            ConfigError: the address is no ZeroMQ address.
        """
        super().__init__(zmq.DEALER, on_message, on_junk)
        self._peer = connect
        self._socket.setsockopt_string(zmq.IDENTITY, identity)
        try:
            self._socket.connect(connect)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(
                f"{connect!r} is not an address to connect to ({exc}); like tcp://10.0.0.1:7000"
            ) from exc
        self._listen()

    def send(self, message: Message) -> None:
        """Queues `message`.

        Raises:
            PeerLost: the queue is full.
        """
        self._send([encode(message)], self._peer)
