"""A decode worker's links from prefill workers: handshake, probe, and the messages that follow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.channel import RouterChannel
from twinpool.config import TransportName
from twinpool.errors import (
    ConfigError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    TransferError,
    TransportUnavailable,
)
from twinpool.kv_transfer import probe, transports
from twinpool.kv_transfer.connector import TWO_SIDED, KVReceiver
from twinpool.kv_transfer.life import Witness
from twinpool.kv_transfer.plan import compatible
from twinpool.messages import (
    PROTOCOL_VERSION,
    Message,
    PeerDenied,
    PeerHello,
    PeerInfo,
    PeerUnknown,
    PeerWelcome,
    ProbeAck,
    ProbeGrant,
    ProbeRequest,
    ProbeSeal,
)
from twinpool.worker.links import PROBE_LIMIT_S, LinkSettings, LocalPool, OnJunk, OnPeerMessage, Spawn

log = logging.getLogger(__name__)

OnLinked = Callable[[str, str, str], None]
"""(worker id, incarnation, transport)"""


@dataclass(slots=True)
class _Writer:
    """A prefill worker that said hello. While it is probed, `fence` is the probe's and `seal` is to be its seal."""

    receiver: KVReceiver
    witness: Witness | None = None
    probe: asyncio.Task[None] | None = None
    fence: int = 0
    seal: asyncio.Future[ProbeSeal] = field(default_factory=asyncio.Future)

    def cancel_probe(self) -> None:
        """Ends the probe under way, if there is one."""
        if self.probe is not None:
            self.probe.cancel()


class IncomingLinks:
    """A decode worker's side: one socket for all prefill workers, one receiver per transport in use, and
    for encrypted KV one of its own.

    Only workers that were added are let in: for others, whatever they call themselves, nothing is kept.

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
        spawn: Spawn,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._on_linked = on_linked
        self._on_message = on_message
        self._on_junk = on_junk
        self._usable = list(settings.transports)
        self._known: set[str] = set()
        self._writers: dict[str, _Writer] = {}
        self._lost_alive: dict[tuple[str, str], Witness] = {}
        self._receivers: dict[tuple[TransportName, bool], KVReceiver] = {}
        self._next_probe_fence = probe.FIRST_PROBE_FENCE
        self._probe_lock = asyncio.Lock()
        self._spawn = spawn
        self._channel = RouterChannel(bind, settings.join_token, self._received, on_junk, setting="--kv-host")

    @property
    def endpoint(self) -> str:
        """Where prefill workers connect."""
        return self._channel.endpoint

    @property
    def num_dropped(self) -> int:
        """Pushes that were dropped because their fence was not expected. It only grows."""
        return sum(receiver.num_dropped for receiver in self._receivers.values())

    @property
    def num_junk(self) -> int:
        """Strangers on the KV sockets. It only grows."""
        return sum(receiver.num_junk for receiver in self._receivers.values())

    def receiver_of(self, writer: str) -> KVReceiver:
        """The receiver that the worker `writer` (id/incarnation) pushes into. Raises PeerLost."""
        try:
            return self._writers[writer].receiver
        except KeyError as exc:
            raise PeerLost(f"no link from {writer}") from exc

    def send(self, worker_id: str, incarnation: str, message: Message) -> None:
        """Queues a message for a prefill worker. Raises PeerLost."""
        self._channel.send(f"{worker_id}/{incarnation}", message)

    def add(self, peer: PeerInfo) -> None:
        """From now on that process may open its link."""
        self._known.add(_identity(peer))

    def drop(self, peer: PeerInfo) -> bool:
        """That process counts as gone: nothing more of it is believed. Returns false if it may still write: it writes
        one-sidedly, and its lock says that it lives. `departed` tells when it has died."""
        identity = _identity(peer)
        self._known.discard(identity)
        if (writer := self._writers.pop(identity, None)) is None:
            return True
        writer.cancel_probe()
        if writer.witness is None:
            return True
        if writer.witness.is_over:
            writer.witness.close()
            return True
        self._lost_alive[peer.worker_id, peer.incarnation] = writer.witness
        log.warning(
            "%s is lost, but its process lives, frozen perhaps: the blocks that it was writing stay unused until it is "
            "dead", identity,
        )  # fmt: skip
        return False

    def departed(self) -> list[tuple[str, str]]:
        """The workers (id and incarnation) that `drop` found alive, and that have died since the last call."""
        over = [name for name, witness in self._lost_alive.items() if witness.is_over]
        for name in over:
            self._lost_alive.pop(name).close()
        return over

    async def close(self) -> None:
        """Releases the socket and the receivers. Its owner has cancelled the tasks that it spawned for this."""
        self._channel.close()
        for witness in (*self._lost_alive.values(), *(writer.witness for writer in self._writers.values())):
            if witness is not None:
                witness.close()
        for receiver in self._receivers.values():
            await receiver.close()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────

    def _received(self, identity: str, message: Message) -> None:
        if isinstance(message, PeerHello):
            if identity in self._known:
                self._spawn(self._welcome(identity, message))
            else:
                self._try_send(identity, PeerUnknown())
            return
        writer = self._writers.get(identity)
        if writer is None:
            self._on_junk(identity, ProtocolError(f"{type(message).__name__} before a hello"))
        elif isinstance(message, ProbeRequest):
            if writer.probe is None or writer.probe.done():
                writer.probe = self._spawn(self._be_probed(identity, writer, message.num_blocks))
        elif isinstance(message, ProbeSeal):
            if message.fence == writer.fence and not writer.seal.done():
                writer.seal.set_result(message)
        else:
            worker_id, _, incarnation = identity.rpartition("/")
            self._on_message(worker_id, incarnation, message)

    async def _welcome(self, identity: str, hello: PeerHello) -> None:
        mine = self._settings
        try:
            self._check(identity, hello)
            wanted = mine.wanted if hello.transport == TransportName.AUTO else hello.transport
            same_host = hello.host == mine.host
            must_seal = any(e.seals(same_host) for e in (mine.encryption, hello.encryption))
            name = await self._opened(wanted, hello.transports, same_host, must_seal)
            if identity not in self._known:  # dropped meanwhile
                return
            witness = Witness(hello.life) if same_host and name not in TWO_SIDED and hello.life else None
        except (LayoutMismatch, TransportUnavailable, ProtocolError, ConfigError) as exc:
            self._try_send(identity, PeerDenied(str(exc)))
            return
        if before := self._writers.get(identity):  # it opens its link again
            before.cancel_probe()
            if before.witness is not None:
                before.witness.close()
        receiver = self._receivers[name, must_seal]
        self._writers[identity] = _Writer(receiver, witness)
        welcome = PeerWelcome(mine.end.worker_id, mine.end.incarnation, name, receiver.address(), mine.host)
        self._try_send(identity, welcome)

    async def _opened(
        self, wanted: str, theirs: tuple[str, ...], same_host: bool, must_seal: bool
    ) -> TransportName:
        """The transport for such a link, whose receiver is open. With "auto", one that does not open is logged and left
        out from then on; in strict mode it is an error like with any other setting.

        Raises:
            TransportUnavailable: there is none.
        """
        mine = self._settings
        while True:
            name = transports.choose(wanted, self._usable, theirs, same_host, must_seal)
            if (name, must_seal) in self._receivers:
                return name
            try:
                self._receivers[name, must_seal] = await transports.receiver(
                    name, self._pool.region, mine.end, self._pool.shared, seal=must_seal
                )
            except TransportUnavailable as exc:
                if wanted != TransportName.AUTO or mine.strict:
                    raise
                log.warning("transport %s does not work here: %s", name, exc)
                if name in self._usable:  # or another link has found it out meanwhile
                    self._usable.remove(name)

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
                f"{self._pool.fingerprint}; start both with the same model files, --weights and --kv-cache-dtype"
            )
        compatible(self._pool.region.layout, hello.layout)

    async def _be_probed(self, identity: str, writer: _Writer, num_blocks: int) -> None:
        async with self._probe_lock:
            receiver = writer.receiver
            fence, self._next_probe_fence = self._next_probe_fence, self._next_probe_fence + 1
            blocks = self._pool.probe_blocks[:num_blocks]
            receiver.expect(fence, identity, blocks)
            writer.fence, writer.seal = fence, asyncio.Future()
            self._try_send(identity, ProbeGrant(fence, blocks))
            error = ""
            try:
                async with asyncio.timeout(PROBE_LIMIT_S):
                    seal = await writer.seal
                    await probe.check_probe(
                        receiver, self._pool.region, fence, blocks, seal.digests, PROBE_LIMIT_S
                    )
                receiver.forget(fence)
            except TimeoutError:
                error = f"the probe has not ended within {PROBE_LIMIT_S:.0f} s"
            except (TransferError, LayoutMismatch) as exc:
                error = str(exc)
            finally:
                await receiver.cancel(fence)  # does nothing to a fence that is forgotten
            if not error:
                worker_id, _, incarnation = identity.rpartition("/")
                self._on_linked(worker_id, incarnation, receiver.name)
            self._try_send(identity, ProbeAck(fence, error))

    def _try_send(self, identity: str, message: Message) -> None:
        try:
            self._channel.send(identity, message)
        except PeerLost as exc:
            log.info("no answer to %s: %s", identity, exc)


def _identity(peer: PeerInfo) -> str:
    return f"{peer.worker_id}/{peer.incarnation}"
