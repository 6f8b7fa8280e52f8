"""Control messages over ZeroMQ: the only module that knows zmq.

A channel hands each message that arrives to one callback, on the event loop; sending never blocks. The identity of a
connection is ``worker_id/incarnation``: a process that comes back has a new one, so it is never mistaken for the old.

Every connection is encrypted and authenticated both ways by CURVE (https://rfc.zeromq.org/spec/26). Both key pairs, the
bound side's and the one that all connecting sides share, are made from the join token. Without the token nobody gets a
message in, reads one, or is taken for the bound side.
"""

from __future__ import annotations

import asyncio
import hmac
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from twinpool.errors import ConfigError, PeerLost, ProtocolError, StrangerRefused
from twinpool.join_token import JoinToken
from twinpool.messages import MAX_MESSAGE_BYTES, Message, decode, encode

MAX_QUEUED_MESSAGES = 100_000
HANDSHAKE_LIMIT_MS = 5_000
"""A connection that has not proved by then that it has the token is cut off."""
RECONNECT_MS = 250
LONGEST_RECONNECT_MS = 2_000

_BEGUN = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_WATCHED = _BEGUN | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ADMIT, _TURN_AWAY = (b"200", b"OK"), (b"400", b"another join token")

OnMessage = Callable[[str, Message], None]
OnJunk = Callable[[str, ProtocolError], None]


class Channel(ABC):
    """One ZeroMQ socket on the running event loop. Use `RouterChannel` or `DealerChannel`.

    `on_message(identity, message)` is called for each message that decodes, `on_junk(identity, error)` for each that
    does not; neither may block or raise. Identity is "" on a dealer, whose only peer is the one it connected to.
    """

    def __init__(self, kind: int, token: JoinToken, on_message: OnMessage, on_junk: OnJunk) -> None:
        self._on_message = on_message
        self._on_junk = on_junk
        self._keys = _Keys(token)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._drain_scheduled = False
        self._closed = False
        self._greeting: dict[int, None] = {}
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._loop.call_soon(self._watch)  # zmq wakes only a reader that has found nothing before

    def _listen(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._schedule_drain()

    def _watch(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._look_at(event["event"], int(event["value"]))

    def _look_at(self, event: int, descriptor: int) -> None:
        """Keeps `_greeting`, the connections whose handshake is not over, in order.

        zmq does not say whose handshake has succeeded. It is taken to be the latest connection's: had the older ones
        the token, theirs would have succeeded before.
        """
        if event & _BEGUN:
            self._greeting[descriptor] = None
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._greeting:
                self._greeting.popitem()
            self._handshake_ended(succeeded=True)
        elif descriptor in self._greeting:
            del self._greeting[descriptor]
            self._handshake_ended(succeeded=False)
        else:
            self._connection_ended()

    @abstractmethod
    def _handshake_ended(self, succeeded: bool) -> None:
        """A connection is up, or is given up because the other side has another token or is no channel at all."""

    def _connection_ended(self) -> None:  # noqa: B027  # of no concern to the bound side
        """A connection that was up has ended, and what was on it is lost."""

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
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._close_helpers()
            self._context.term()

    def _close_helpers(self) -> None:  # noqa: B027  # a dealer has no such helpers
        """Closes what else uses the context."""

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class RouterChannel(Channel):
    """The bound side: many peers, told apart by identity."""

    def __init__(
        self,
        bind: str,
        token: JoinToken,
        on_message: OnMessage,
        on_junk: OnJunk,
        *,
        setting: str = "--control",
    ) -> None:
        """Binds to `bind`; a port of ``*`` takes any free one. `setting` is the flag that an error names. A connection
        without the token is reported to `on_junk` as StrangerRefused, without an identity.

        Raises:
            ConfigError: the address cannot be bound.
        """
        super().__init__(zmq.ROUTER, token, on_message, on_junk)
        self._doorkeeper = _Doorkeeper(self._context, self._loop, self._keys.client_public)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"twinpool")
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

    def _handshake_ended(self, succeeded: bool) -> None:
        if not succeeded:
            self._on_junk(
                "", StrangerRefused(f"somebody at {self.endpoint} who did not prove to have the join token")
            )

    def _close_helpers(self) -> None:
        self._doorkeeper.close()


class DealerChannel(Channel):
    """The connecting side: one peer.

    `num_refused` counts the connections, since the last that succeeded, which the other side took and then broke off:
    it has another token, or is no channel. `num_broken` counts connections that were up and ended. zmq connects again
    by itself, but messages that were on their way, in either direction, are lost.
    """

    def __init__(
        self, connect: str, identity: str, token: JoinToken, on_message: OnMessage, on_junk: OnJunk
    ) -> None:
        """Connects to `connect` (in the background) under `identity`.

        Raises:
            ConfigError: the address is no ZeroMQ address.
        """
        super().__init__(zmq.DEALER, token, on_message, on_junk)
        self.num_refused = 0
        self.num_broken = 0
        self._peer = connect
        self._socket.setsockopt_string(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MS)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public)
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

    def _handshake_ended(self, succeeded: bool) -> None:
        self.num_refused = 0 if succeeded else self.num_refused + 1

    def _connection_ended(self) -> None:
        self.num_broken += 1


class _Keys:
    """Both key pairs, in zmq's printable form (Z85)."""

    def __init__(self, token: JoinToken) -> None:
        self.server_secret = z85.encode(token.key("channel server"))
        self.server_public = zmq.curve_public(self.server_secret)
        self.client_secret = z85.encode(token.key("channel client"))
        self.client_public = zmq.curve_public(self.client_secret)


class _Doorkeeper:
    """Tells zmq (https://rfc.zeromq.org/spec/27) to let in only clients that have proved to hold the key `admitted`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], loop: asyncio.AbstractEventLoop, admitted: bytes
    ) -> None:
        self._admitted = z85.decode(admitted)
        self._loop = loop
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP_ADDRESS)
        loop.add_reader(self._socket.fileno(), self._answer)
        loop.call_soon(self._answer)

    def _answer(self) -> None:
        while not self._socket.closed:
            try:
                version, request_id, _domain, _address, _identity, mechanism, *proofs = (
                    self._socket.recv_multipart(zmq.NOBLOCK)
                )
            except zmq.Again:
                return
            may_enter = mechanism == b"CURVE" and hmac.compare_digest(proofs[0], self._admitted)
            code, reason = _ADMIT if may_enter else _TURN_AWAY
            self._socket.send_multipart([version, request_id, code, reason, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Answers no more."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
