"""Links between prefill and decode workers: handshake, probe, and the messages that follow.

A prefill worker holds one `OutgoingLink` per decode worker; a decode worker one `IncomingLinks` for all. What they do
not need themselves goes to the role's core.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from twinpool.channel import DealerChannel, RouterChannel
from twinpool.config import TransportName
from twinpool.errors import LayoutMismatch, PeerLost, ProtocolError, TransferError, TransportUnavailable
from twinpool.kv_transfer import probe, transports
from twinpool.kv_transfer.connector import KVReceiver, KVRegion, KVSender, LocalEnd
from twinpool.kv_transfer.plan import compatible
from twinpool.kv_transfer.shm import SharedPool
from twinpool.messages import (
    PROTOCOL_VERSION,
    Message,
    PeerDenied,
    PeerHello,
    PeerInfo,
    PeerWelcome,
    ProbeAck,
    ProbeGrant,
    ProbeRequest,
    ProbeSeal,
)

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 15.0
PROBE_LIMIT_S = 15.0

OnPeerMessage = Callable[[str, str, Message], None]
OnLinked = Callable[[str, str, str], None]
OnJunk = Callable[[str, ProtocolError], None]


@dataclass(frozen=True, slots=True)
class LocalPool:
    """This worker's KV pool as links see it. `probe_blocks` lie behind the blocks that the role's core deals out."""

    region: KVRegion
    shared: SharedPool | None
    probe_blocks: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Who this worker is and how it wants KV to travel. `host` tells machines apart (not an address)."""

    end: LocalEnd
    host: str
    wanted: TransportName
    transports: tuple[str, ...]
    faults: str = ""
    strict: bool = False


class OutgoingLink:
    """A prefill worker's link to one decode worker: its messages, and the sender of its KV."""

    def __init__(
        self,
        peer: PeerInfo,
        pool: LocalPool,
        settings: LinkSettings,
        on_message: OnPeerMessage,
        on_junk: OnJunk,
    ):
        self.peer = peer
        self._pool = pool
        self._settings = settings
        self._on_message = on_message
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._sender: KVSender | None = None
        self._channel = DealerChannel(peer.endpoint, settings.end.writer, self._received, on_junk)

    @property
    def sender(self) -> KVSender:
        """What pushes to this worker. Raises PeerLost before `open` and after `close`."""
        if self._sender is None:
            raise PeerLost(f"no link to {self.peer.worker_id}")
        return self._sender

    async def open(self, lock: asyncio.Lock) -> probe.ProbeResult:
        """Shakes hands, opens the transport and measures it. `lock` keeps probes of several links apart.

        With "auto", a transport that both sides have but that does not work between them is logged and left out; in
        strict mode it is an error like with any other setting.

        Raises:
            LayoutMismatch: the decode worker refused; the message names both sides' values.
            TransferError: no transport works, or the worker does not answer.
        """
        usable = list(self._settings.transports)
        while True:
            welcome = await self._shake_hands(tuple(usable))
            try:
                async with lock:
                    return await self._try_transport(TransportName(welcome.transport), welcome.address)
            except TransferError as exc:
                if self._settings.wanted is not TransportName.AUTO or self._settings.strict:
                    raise
                log.warning("%s: transport %s does not work: %s", self.peer.worker_id, welcome.transport, exc)
                await self._close_sender()
                usable.remove(welcome.transport)

    def send(self, message: Message) -> None:
        """Queues a message for the decode worker. Raises PeerLost."""
        self._channel.send(message)

    async def close(self) -> None:
        """Releases the transport and the connection."""
        await self._close_sender()
        self._channel.close()

    async def _close_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.close()

    async def _shake_hands(self, usable: tuple[str, ...]) -> PeerWelcome:
        end, region = self._settings.end, self._pool.region
        self._channel.send(
            PeerHello(
                worker_id=end.worker_id,
                incarnation=end.incarnation,
                fingerprint=self._pool.fingerprint,
                layout=region.layout,
                transport=self._settings.wanted,
                transports=usable,
                host=self._settings.host,
            )
        )
        answer = await self._answer((PeerWelcome, PeerDenied))
        if isinstance(answer, PeerDenied):
            raise LayoutMismatch(answer.reason)
        if not isinstance(answer, PeerWelcome) or answer.incarnation != self.peer.incarnation:
            raise PeerLost(
                f"{self.peer.worker_id} at {self.peer.endpoint} is another process than the one expected"
            )
        return answer

    async def _try_transport(self, name: TransportName, address: bytes) -> probe.ProbeResult:
        region, blocks = self._pool.region, self._pool.probe_blocks
        sender = await transports.sender(name, address, region, self._settings.end, self._settings.faults)
        self._sender = sender
        self._channel.send(ProbeRequest(len(blocks)))
        grant = await self._answer((ProbeGrant,))
        assert isinstance(grant, ProbeGrant)
        source = blocks[: len(grant.block_ids)]
        result = await probe.send_probe(sender, region, grant.fence, source, grant.block_ids, PROBE_LIMIT_S)
        self._channel.send(ProbeSeal(grant.fence, result.digests))
        ack = await self._answer((ProbeAck,))
        assert isinstance(ack, ProbeAck)
        if ack.error:
            raise TransferError(f"the probe failed: {ack.error}")
        return result

    async def _answer(self, kinds: tuple[type[Message], ...]) -> Message:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                while not isinstance(answer := await self._answers.get(), kinds):
                    log.info("%s: out of turn: %s", self.peer.worker_id, type(answer).__name__)
                return answer
        except TimeoutError as exc:
            raise PeerLost(f"{self.peer.worker_id} has not answered for {ANSWER_LIMIT_S:.0f} s") from exc

    def _received(self, _: str, message: Message) -> None:
        if isinstance(message, (PeerWelcome, PeerDenied, ProbeGrant, ProbeAck)):
            self._answers.put_nowait(message)
        else:
            self._on_message(self.peer.worker_id, self.peer.incarnation, message)


@dataclass(slots=True)
class _Writer:
    """A prefill worker that said hello, and where its answers to probes go."""

    transport: TransportName
    seals: asyncio.Queue[ProbeSeal] = field(default_factory=asyncio.Queue)
    probe: asyncio.Task[None] | None = None


class IncomingLinks:
    """A decode worker's side: one socket for all prefill workers, one receiver per transport in use.

    `on_linked(worker_id, incarnation, transport)` is called when a worker's probe has arrived, before the worker knows;
    `on_message(worker_id, incarnation, message)` gets what is not of a handshake, from workers that shook hands only.
    """

    def __init__(
        self,
        bind: str,
        pool: LocalPool,
        settings: LinkSettings,
        on_linked: OnLinked,
        on_message: OnPeerMessage,
        on_junk: OnJunk,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._on_linked = on_linked
        self._on_message = on_message
        self._on_junk = on_junk
        self._writers: dict[str, _Writer] = {}
        self._receivers: dict[TransportName, KVReceiver] = {}
        self._next_probe_fence = probe.FIRST_PROBE_FENCE
        self._probe_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = RouterChannel(bind, self._received, on_junk)

    @property
    def endpoint(self) -> str:
        """Where prefill workers connect."""
        return self._channel.endpoint

    def receiver_of(self, writer: str) -> KVReceiver:
        """The receiver that the worker `writer` (id/incarnation) pushes into. Raises PeerLost."""
        try:
            return self._receivers[self._writers[writer].transport]
        except KeyError as exc:
            raise PeerLost(f"no link from {writer}") from exc

    def send(self, worker_id: str, incarnation: str, message: Message) -> None:
        """Queues a message for a prefill worker. Raises PeerLost."""
        self._channel.send(f"{worker_id}/{incarnation}", message)

    def forget(self, worker_id: str, incarnation: str) -> None:
        """That process is gone: nothing more of it is believed."""
        writer = self._writers.pop(f"{worker_id}/{incarnation}", None)
        if writer and writer.probe:
            writer.probe.cancel()

    async def close(self) -> None:
        """Releases the socket, the receivers and their shared memory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channel.close()
        for receiver in self._receivers.values():
            await receiver.close()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────

    def _received(self, identity: str, message: Message) -> None:
        if isinstance(message, PeerHello):
            self._spawn(self._welcome(identity, message))
            return
        writer = self._writers.get(identity)
        if writer is None:
            self._on_junk(identity, ProtocolError(f"{type(message).__name__} before a hello"))
        elif isinstance(message, ProbeRequest):
            if writer.probe is None or writer.probe.done():
                writer.probe = self._spawn(self._be_probed(identity, writer, message.num_blocks))
        elif isinstance(message, ProbeSeal):
            writer.seals.put_nowait(message)
        else:
            worker_id, _, incarnation = identity.rpartition("/")
            self._on_message(worker_id, incarnation, message)

    async def _welcome(self, identity: str, hello: PeerHello) -> None:
        mine = self._settings
        try:
            self._check(identity, hello)
            wanted = mine.wanted if hello.transport == TransportName.AUTO else TransportName(hello.transport)
            name = transports.choose(wanted, mine.transports, hello.transports, hello.host == mine.host)
            if name not in self._receivers:
                self._receivers[name] = await transports.receiver(
                    name, self._pool.region, mine.end, self._pool.shared
                )
        except (LayoutMismatch, TransportUnavailable, ProtocolError) as exc:
            self._try_send(identity, PeerDenied(str(exc)))
            return
        self._writers[identity] = _Writer(name)
        address = self._receivers[name].address()
        self._try_send(identity, PeerWelcome(mine.end.worker_id, mine.end.incarnation, name, address))

    def _check(self, identity: str, hello: PeerHello) -> None:
        if identity != f"{hello.worker_id}/{hello.incarnation}":
            raise ProtocolError(
                f"a hello of {hello.worker_id}/{hello.incarnation} on the connection of {identity}"
            )
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol {hello.protocol} there, {PROTOCOL_VERSION} here; run one version of Twinpool"
            )
        if hello.fingerprint != self._pool.fingerprint:
            raise LayoutMismatch(
                f"{hello.worker_id} runs model {hello.fingerprint}, {self._settings.end.worker_id} runs "
                f"{self._pool.fingerprint}; start both with the same model files"
            )
        compatible(self._pool.region.layout, hello.layout)

    async def _be_probed(self, identity: str, writer: _Writer, num_blocks: int) -> None:
        async with self._probe_lock:
            receiver = self._receivers[writer.transport]
            fence, self._next_probe_fence = self._next_probe_fence, self._next_probe_fence + 1
            blocks = self._pool.probe_blocks[:num_blocks]
            receiver.expect(fence, identity, blocks)
            self._try_send(identity, ProbeGrant(fence, blocks))
            error = ""
            try:
                async with asyncio.timeout(PROBE_LIMIT_S):
                    while (seal := await writer.seals.get()).fence != fence:
                        pass
                await probe.check_probe(
                    receiver, self._pool.region, fence, blocks, seal.digests, PROBE_LIMIT_S
                )
                receiver.forget(fence)
            except TimeoutError:
                error = f"no seal within {PROBE_LIMIT_S:.0f} s"
            except TransferError as exc:
                error = str(exc)
            if error:
                await receiver.cancel(fence)
            else:
                worker_id, _, incarnation = identity.rpartition("/")
                self._on_linked(worker_id, incarnation, writer.transport)
            self._try_send(identity, ProbeAck(fence, error))

    def _try_send(self, identity: str, message: Message) -> None:
        try:
            self._channel.send(identity, message)
        except PeerLost as exc:
            log.info("no answer to %s: %s", identity, exc)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
