"""A prefill worker's links to decode workers: handshake, probe, the messages that follow, and opening them again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from twinpool.channel import DealerChannel
from twinpool.config import TransportName
from twinpool.errors import ConfigError, LayoutMismatch, PeerLost, ProtocolError, TransferError
from twinpool.kv_transfer import probe, transports
from twinpool.kv_transfer.connector import KVSender
from twinpool.kv_transfer.mirrored import MirroredSender
from twinpool.messages import (
    LinkFailed,
    LinkReady,
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
from twinpool.worker.core import Event, FromPeer, LinkLost, PeerLinked
from twinpool.worker.links import (
    PROBE_LIMIT_S,
    TURNED_AWAY,
    LinkSettings,
    LocalPool,
    OnJunk,
    OnPeerMessage,
    Spawn,
)

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 2 * PROBE_LIMIT_S
"""The decode worker probes one link at a time: an answer may have to wait for a probe that ends by its own limit."""
HELLO_AGAIN_S = 0.1
MOST_HELLOS = 100
"""A decode worker may hear of this one from the coordinator later than the other way round: by much less than that."""
MAX_ANSWERS = 8
LOOK_S = 0.2
"""How often an open link is asked whether it is lost."""
HELD_S = 60.0
"""A link that worked for so long is not one that fails again and again."""


class OutgoingLink:
    """A prefill worker's link to one decode worker: its messages, and the sender of its KV.

    Messages flow from the start until `close`, KV from each `open` until that link is lost.
    """

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
        self._on_junk = on_junk
        self._answers: asyncio.Queue[Message] = asyncio.Queue(MAX_ANSWERS)
        self._sender: KVSender | None = None
        self._channel = DealerChannel(
            peer.endpoint, settings.end.writer, settings.join_token, self._received, on_junk
        )

    @property
    def sender(self) -> KVSender:
        """What pushes to this worker. Raises PeerLost before `open` and after `close`."""
        if self._sender is None:
            raise PeerLost(f"no link to {self.peer.worker_id}")
        return self._sender

    async def open(self, lock: asyncio.Lock) -> probe.ProbeResult:
        """Shakes hands, opens the transport and measures it. `lock` keeps probes of several links apart.

        May be called again after it failed or the link was lost: the other side forgets what was before the hello.

        With "auto", a transport that both sides have but that does not work between them is logged and left out; in
        strict mode it is an error like with any other setting.

        Raises:
            LayoutMismatch: the decode worker refused; the message names both sides' values.
            TransferError: no transport works, or the worker does not answer.
        """
        usable = list(self._settings.transports)
        await self._close_sender()
        while True:
            welcome = await self._shake_hands(tuple(usable))
            if welcome.transport not in usable:
                raise TransferError(
                    f"{self.peer.worker_id} wants {welcome.transport}, which was not offered to it"
                )
            try:
                async with lock:
                    return await self._try_transport(welcome)
            except TransferError as exc:
                await self._close_sender()
                if self._settings.wanted is not TransportName.AUTO or self._settings.strict:
                    raise
                log.warning("%s: transport %s does not work: %s", self.peer.worker_id, welcome.transport, exc)
                usable.remove(welcome.transport)

    async def lost(self) -> str:
        """Returns when the open link has ended, with the reason; its sender is closed then."""
        sender = self.sender
        while (reason := sender.lost) is None:  # noqa: ASYNC110  # transports lose links on threads of their own
            await asyncio.sleep(LOOK_S)
        await self._close_sender()
        return reason

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
        while not self._answers.empty():
            self._answers.get_nowait()  # to what was asked before this hello
        hello = PeerHello(
            worker_id=end.worker_id,
            incarnation=end.incarnation,
            fingerprint=self._pool.fingerprint,
            layout=region.layout,
            transport=self._settings.wanted,
            transports=usable,
            host=self._settings.host,
            encryption=self._settings.encryption,
            life=self._settings.life,
        )
        for _ in range(MOST_HELLOS):
            self._channel.send(hello)
            answer = await self._answer((PeerWelcome, PeerDenied, PeerUnknown))
            if not isinstance(answer, PeerUnknown):
                break
            await asyncio.sleep(HELLO_AGAIN_S)
        else:
            raise PeerLost(
                f"{self.peer.worker_id} has not heard of this worker from its coordinator; do both have the same one?"
            )
        if isinstance(answer, PeerDenied):
            raise LayoutMismatch(answer.reason)
        if not isinstance(answer, PeerWelcome) or answer.incarnation != self.peer.incarnation:
            raise PeerLost(
                f"{self.peer.worker_id} at {self.peer.endpoint} is another process than the one expected"
            )
        return answer

    async def _try_transport(self, welcome: PeerWelcome) -> probe.ProbeResult:
        region, blocks, mine = self._pool.region, self._pool.probe_blocks, self._settings
        sender = await transports.sender(
            welcome.transport,
            welcome.address,
            region,
            mine.end,
            mine.faults,
            seal=mine.encryption.seals(same_host=welcome.host == mine.host),
        )
        self._sender = MirroredSender(sender, self._pool.mirror) if self._pool.mirror else sender
        self._channel.send(ProbeRequest(len(blocks)))
        grant = await self._answer((ProbeGrant,))
        assert isinstance(grant, ProbeGrant)
        if len(grant.block_ids) > len(blocks):
            raise TransferError(f"{len(grant.block_ids)} blocks were granted for a probe of {len(blocks)}")
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
            if self._channel.num_refused:
                raise PeerLost(f"{self.peer.worker_id} at {self.peer.endpoint} {TURNED_AWAY}") from exc
            raise PeerLost(f"{self.peer.worker_id} has not answered for {ANSWER_LIMIT_S:.0f} s") from exc

    def _received(self, _: str, message: Message) -> None:
        if isinstance(message, (PeerWelcome, PeerDenied, PeerUnknown, ProbeGrant, ProbeAck)):
            try:
                self._answers.put_nowait(message)
            except asyncio.QueueFull:
                self._on_junk(
                    self.peer.worker_id, ProtocolError(f"{type(message).__name__} that nobody asked for")
                )
        else:
            self._on_message(self.peer.worker_id, self.peer.incarnation, message)


class Reopening:
    """When to try again to open one link, and when no more.

    Every failure takes the next of `pauses_s`. A link that held for `HELD_S` has earned all of them anew.
    """

    def __init__(self, pauses_s: Sequence[float]) -> None:
        self._pauses_s = pauses_s
        self._num_failures = 0
        self._opened_at: float | None = None

    def opened(self, now: float) -> None:
        """The link works from `now` on."""
        self._opened_at = now

    def failed(self, now: float) -> float | None:
        """The link could not be opened, or is lost; returns seconds to wait before the next try, None to give up."""
        if self._opened_at is not None and now - self._opened_at >= HELD_S:
            self._num_failures = 0
        self._opened_at = None
        self._num_failures += 1
        if self._num_failures > len(self._pauses_s):
            return None
        return self._pauses_s[self._num_failures - 1]


class OutgoingLinks:
    """A prefill worker's side: a link to every decode worker, opened again when it fails or is lost.

    `senders` maps a decode worker's id to what pushes to it, while that works. `emit` takes the core's events, `report`
    what the coordinator is told: LinkFailed at each failure, LinkReady whenever the link works.
    """

    def __init__(
        self,
        pool: LocalPool,
        settings: LinkSettings,
        emit: Callable[[Event], None],
        report: Callable[[LinkReady | LinkFailed], None],
        on_junk: OnJunk,
        spawn: Spawn,
    ) -> None:
        self.senders: dict[str, KVSender] = {}
        self._pool = pool
        self._settings = settings
        self._emit = emit
        self._report = report
        self._on_junk = on_junk
        self._spawn = spawn
        self._probing = asyncio.Lock()
        self._links: dict[str, OutgoingLink] = {}
        self._keepers: dict[OutgoingLink, asyncio.Task[None]] = {}

    def add(self, peer: PeerInfo) -> None:
        """Opens a link to `peer`, and keeps it open, until it is dropped."""
        try:
            link = OutgoingLink(peer, self._pool, self._settings, self._from_peer, self._on_junk)
        except ConfigError as exc:  # no address that can be connected to
            self._report(LinkFailed(peer.worker_id, peer.incarnation, str(exc)))
            return
        self._links[peer.worker_id] = link
        self._keepers[link] = self._spawn(self._keep(link))

    def drop(self, peer: PeerInfo) -> None:
        """That process is gone: nothing more goes to it, nothing more of it is heard."""
        if (link := self._links.get(peer.worker_id)) and link.peer.incarnation == peer.incarnation:
            del self._links[peer.worker_id]
            self.senders.pop(peer.worker_id, None)
            self._spawn(self._close(link))

    def notice_losses(self) -> None:
        """A push has failed: reports at once what is lost, so that the coordinator hears of the link before it hears of
        the requests, and starts none of them again over that link."""
        for link in list(self._links.values()):
            sender = self.senders.get(link.peer.worker_id)
            if sender is not None and (reason := sender.lost) is not None:
                self._lost(link, reason)

    def send(self, worker_id: str, incarnation: str, message: Message) -> None:
        """Queues a message for that decode worker. Raises PeerLost."""
        link = self._links.get(worker_id)
        if link is None or link.peer.incarnation != incarnation:
            raise PeerLost(f"no link to {worker_id}/{incarnation}")
        link.send(message)

    async def close(self) -> None:
        """Closes every link. Its owner has cancelled the tasks that it spawned for this."""
        for link in list(self._keepers):
            await self._close(link)

    async def _close(self, link: OutgoingLink) -> None:
        keeper = self._keepers[link]
        keeper.cancel()
        await asyncio.wait((keeper,))
        await link.close()
        self._keepers.pop(link, None)

    async def _keep(self, link: OutgoingLink) -> None:
        peer, reopening, now = (
            link.peer,
            Reopening(self._settings.reopen_pauses_s),
            asyncio.get_running_loop().time,
        )
        pause_s: float | None = 0.0
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            is_reported = False
            try:
                result = await link.open(self._probing)
            except LayoutMismatch as exc:
                reason, pause_s = str(exc), None  # it will say so again
            except TransferError as exc:
                reason, pause_s = str(exc), reopening.failed(now())
            else:
                reopening.opened(now())
                self._opened(link, result)
                reason = await link.lost()
                pause_s = reopening.failed(now())
                self._lost(link, reason)
                is_reported = True
            next_try = "given up" if pause_s is None else f"the next try is in {pause_s:g} s"
            log.error("no link to %s: %s; %s", peer.worker_id, reason, next_try)
            if not is_reported:
                self._report(LinkFailed(peer.worker_id, peer.incarnation, reason))

    def _lost(self, link: OutgoingLink, reason: str) -> None:
        peer = link.peer
        if self._links.get(peer.worker_id) is link and self.senders.pop(peer.worker_id, None) is not None:
            self._report(LinkFailed(peer.worker_id, peer.incarnation, reason))
            self._emit(LinkLost(peer.worker_id, peer.incarnation))

    def _opened(self, link: OutgoingLink, result: probe.ProbeResult) -> None:
        peer, sender = link.peer, link.sender
        self.senders[peer.worker_id] = sender
        self._emit(PeerLinked(peer.worker_id, peer.incarnation, sender.name))
        log.info(
            "KV to %s by %s: %.1f GB/s (probe of %d bytes)",
            peer.worker_id, sender.name, result.gb_per_s, result.num_bytes,
        )  # fmt: skip
        self._report(
            LinkReady(peer.worker_id, peer.incarnation, sender.name, result.gb_per_s, result.num_bytes)
        )

    def _from_peer(self, worker_id: str, incarnation: str, message: Message) -> None:
        self._emit(FromPeer(worker_id, incarnation, message))
