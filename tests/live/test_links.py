"""Links between a prefill and a decode worker over real sockets: opened, lost, opened again, given up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.join_token import TEST_TOKEN

from twinpool.config import Encryption, Role, TransportName
from twinpool.errors import PeerLost, ProtocolError, TransportUnavailable
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.kv_transfer.life import Life
from twinpool.kv_transfer.tcp_wire import TcpAddress
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import LinkFailed, LinkReady, Message, PeerInfo, PeerUnknown, Renew, RevokeAck
from twinpool.request import RequestKey
from twinpool.worker import incoming, outgoing
from twinpool.worker.core import Event, LinkLost, PeerLinked
from twinpool.worker.incoming import IncomingLinks
from twinpool.worker.links import LinkSettings, LocalPool
from twinpool.worker.outgoing import OutgoingLinks, Reopening

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=8, dtype=Dtype.FLOAT32)
NUM_BLOCKS = 4
PREFILL, DECODE = LocalEnd("prefill-0", "a1"), LocalEnd("decode-0", "b1")
WRITER = PeerInfo(PREFILL.worker_id, PREFILL.incarnation, Role.PREFILL, "")
DEADLINE_S = 20.0

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


class Pair:
    """A prefill and a decode worker's ends, without cores: what would go to these and the coordinator is kept."""

    def __init__(
        self,
        transport: TransportName,
        pauses_s: tuple[float, ...],
        usable: tuple[TransportName, ...] = (),
        *,
        strict: bool = False,
    ) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self.events: list[Event] = []
        self.reports: asyncio.Queue[Message] = asyncio.Queue()
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.linked: list[tuple[str, str, str]] = []
        self.junk: list[ProtocolError] = []
        self.incoming = IncomingLinks(
            "tcp://127.0.0.1:*",
            pool("model"),
            LinkSettings(DECODE, "host", transport, usable or (transport,), TEST_TOKEN, strict=strict),
            lambda *peer: self.linked.append(peer),
            lambda _worker, _life, message: self.heard.put_nowait(message),
            self._junk,
            self._spawn,
        )
        self.incoming.add(WRITER)
        self.peer = PeerInfo("decode-0", "b1", Role.DECODE, self.incoming.endpoint)
        self.settings = LinkSettings(
            PREFILL, "host", transport, usable or (transport,), TEST_TOKEN, reopen_pauses_s=pauses_s
        )
        self.outgoing = self.links("model")

    def links(self, fingerprint: str) -> OutgoingLinks:
        """A prefill worker's end that serves the model `fingerprint`."""
        return OutgoingLinks(
            pool(fingerprint),
            self.settings,
            self.events.append,
            self.reports.put_nowait,
            self._junk,
            self._spawn,
        )

    async def report(self) -> Message:
        """What the coordinator is told next."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reports.get()

    async def close(self) -> None:
        """Ends everything; a task that failed fails the test."""
        running = [task for task in self._tasks if not task.done()]
        for task in running:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.outgoing.close()
        await self.incoming.close()
        assert not [exc for exc in results if isinstance(exc, Exception)]
        assert not self.junk

    def _junk(self, _: str, error: ProtocolError) -> None:
        self.junk.append(error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.append(task)
        return task


def pool(fingerprint: str) -> LocalPool:
    memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
    return LocalPool(KVRegion(memory, LAYOUT, NUM_BLOCKS), None, (NUM_BLOCKS - 1,), fingerprint)


@pytest.fixture(params=[TransportName.TCP, TransportName.LOOPBACK])
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(outgoing, "LOOK_S", 0.005)
    pair = Pair(request.param, (0.0, 0.0))
    yield pair
    await pair.close()


async def test_a_link_that_is_lost_while_both_workers_live_is_opened_again(pair: Pair) -> None:
    pair.outgoing.add(pair.peer)
    assert isinstance(await pair.report(), LinkReady)
    before = pair.outgoing.senders["decode-0"]
    await before.close()
    failed = await pair.report()
    assert isinstance(failed, LinkFailed)
    assert "closed" in failed.reason
    assert isinstance(await pair.report(), LinkReady)
    assert pair.events == [
        linked := PeerLinked("decode-0", "b1", pair.settings.wanted),
        LinkLost("decode-0", "b1"),
        linked,
    ]
    assert pair.linked == [("prefill-0", "a1", pair.settings.wanted)] * 2

    after = pair.outgoing.senders["decode-0"]
    receiver = pair.incoming.receiver_of(PREFILL.writer)
    receiver.expect(7, PREFILL.writer, [1])
    after.push(7, BlockRange([0], [1], 0, LAYOUT.num_layers))
    assert (await after.finish(7)).num_bytes == LAYOUT.block_bytes
    await receiver.arrived(7)
    with pytest.raises(PeerLost):
        before.push(8, BlockRange([0], [1], 0, 1))


async def test_a_loss_that_a_push_meets_is_reported_at_once_and_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "LOOK_S", DEADLINE_S)
    pair.outgoing.add(pair.peer)
    assert isinstance(await pair.report(), LinkReady)
    pair.outgoing.notice_losses()
    assert pair.reports.empty()
    await pair.outgoing.senders["decode-0"].close()
    for _ in range(2):
        pair.outgoing.notice_losses()
    assert isinstance(pair.reports.get_nowait(), LinkFailed)
    assert pair.reports.empty()
    assert pair.events[1:] == [LinkLost("decode-0", "b1")]


async def test_a_link_that_stays_lost_is_given_up_after_its_tries_and_messages_still_flow(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.outgoing.add(pair.peer)
    await pair.report()

    async def nobody(*_: object, **__: object) -> None:
        raise PeerLost("no receiver answers")

    monkeypatch.setattr(outgoing.transports, "sender", nobody)
    await pair.outgoing.senders["decode-0"].close()
    reasons = []
    for _ in range(3):
        failed = await pair.report()
        assert isinstance(failed, LinkFailed)
        reasons.append(failed.reason)
    assert "closed" in reasons[0]
    assert reasons[1:] == ["no receiver answers"] * 2
    assert pair.outgoing.senders == {}
    ack = RevokeAck(RequestKey("a", 0), 7)
    pair.outgoing.send("decode-0", "b1", ack)
    async with asyncio.timeout(DEADLINE_S):
        assert await pair.heard.get() == ack
    assert pair.reports.empty()


async def test_a_decode_worker_that_refuses_is_asked_once(pair: Pair) -> None:
    strangers = pair.links("another model")
    strangers.add(pair.peer)
    failed = await pair.report()
    assert isinstance(failed, LinkFailed)
    assert "start both with the same model files" in failed.reason
    await strangers.close()
    assert pair.reports.empty()
    assert pair.events == []


@pytest.mark.parametrize("who", ["prefill", "decode", "default between hosts"])
async def test_ucx_is_refused_if_either_worker_wants_kv_encrypted(who: str) -> None:
    pair = Pair(TransportName.UCX, ())
    sealing = Encryption.ON
    if who == "prefill":
        pair.settings = replace(pair.settings, encryption=sealing)
    elif who == "decode":
        pair.incoming._settings = replace(pair.incoming._settings, encryption=sealing)
    else:
        pair.settings = replace(pair.settings, host="another host")
    links = pair.links("model")
    links.add(pair.peer)
    failed = await pair.report()
    assert isinstance(failed, LinkFailed)
    assert "KV is to be encrypted here, which ucx cannot do" in failed.reason
    await links.close()
    await pair.close()


async def test_a_worker_that_is_known_later_than_it_says_hello_gets_its_link(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "HELLO_AGAIN_S", 0.01)
    pair.incoming.drop(WRITER)
    told = asyncio.Event()
    answer = pair.incoming._try_send

    def tell(identity: str, message: Message) -> None:
        answer(identity, message)
        if isinstance(message, PeerUnknown):
            told.set()

    monkeypatch.setattr(pair.incoming, "_try_send", tell)
    pair.outgoing.add(pair.peer)
    async with asyncio.timeout(DEADLINE_S):
        await told.wait()
    pair.incoming.add(WRITER)
    assert isinstance(await pair.report(), LinkReady)


async def test_a_worker_that_is_not_known_in_the_end_is_told_why_it_has_no_link(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "HELLO_AGAIN_S", 0.0)
    monkeypatch.setattr(outgoing, "MOST_HELLOS", 2)
    pair.incoming.drop(WRITER)
    pair.outgoing.add(pair.peer)
    failed = await pair.report()
    assert isinstance(failed, LinkFailed)
    assert "has not heard of this worker" in failed.reason


async def test_a_worker_that_is_dropped_while_it_is_welcomed_leaves_nothing_behind(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcoming, dropped = asyncio.Event(), asyncio.Event()
    open_receiver = incoming.transports.receiver

    async def slow(*parts: Any, seal: bool) -> Any:
        welcoming.set()
        await dropped.wait()
        return await open_receiver(*parts, seal=seal)

    monkeypatch.setattr(incoming.transports, "receiver", slow)
    pair.outgoing.add(pair.peer)
    async with asyncio.timeout(DEADLINE_S):
        await welcoming.wait()
        assert pair.incoming.drop(WRITER)
        dropped.set()
        while not pair.incoming._receivers:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)
    assert pair.incoming._writers == {}


@pytest.mark.parametrize("strict", [False, True])
async def test_a_transport_that_does_not_load_is_left_out_unless_the_server_is_strict(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_receiver = incoming.transports.receiver

    async def without_ucx(name: TransportName, *parts: Any, seal: bool) -> Any:
        if name is TransportName.UCX:
            raise TransportUnavailable("ucxx cannot be loaded")
        return await open_receiver(name, *parts, seal=seal)

    monkeypatch.setattr(incoming.transports, "receiver", without_ucx)
    usable = (TransportName.UCX, TransportName.TCP)
    pair = Pair(TransportName.AUTO, (), usable, strict=strict)
    pair.outgoing.add(pair.peer)
    report = await pair.report()
    if strict:
        assert isinstance(report, LinkFailed)
        assert "ucxx cannot be loaded" in report.reason
    else:
        assert isinstance(report, LinkReady)
        assert report.transport == TransportName.TCP
    await pair.close()


@pytest.mark.parametrize(("host", "is_sealed"), [("host", False), ("another host", True)])
async def test_kv_is_sealed_between_machines_whatever_address_joins_them(host: str, is_sealed: bool) -> None:
    pair = Pair(TransportName.TCP, ())
    pair.settings = replace(pair.settings, host=host)
    pair.outgoing = pair.links("model")
    pair.outgoing.add(pair.peer)
    assert isinstance(await pair.report(), LinkReady)
    (receiver,) = pair.incoming._receivers.values()
    assert msgspec.msgpack.decode(receiver.address(), type=TcpAddress).sealed is is_sealed
    await pair.close()


async def test_a_peer_that_is_gone_takes_its_link_and_its_messages_with_it(pair: Pair) -> None:
    pair.outgoing.add(pair.peer)
    await pair.report()
    pair.outgoing.drop(pair.peer)
    assert pair.outgoing.senders == {}
    with pytest.raises(PeerLost, match="no link to decode-0/b1"):
        pair.outgoing.send("decode-0", "b1", Renew((1,)))
    pair.incoming.drop(PeerInfo("prefill-0", "a1", Role.PREFILL, ""))
    with pytest.raises(PeerLost, match="no link from prefill-0/a1"):
        pair.incoming.receiver_of(PREFILL.writer)


async def test_a_probe_that_is_cut_short_leaves_nothing_expected(pair: Pair) -> None:
    """The prefill worker dies between the grant of its probe and the seal."""
    granted = asyncio.Event()

    async def dies(*_: object) -> None:
        granted.set()
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outgoing.probe, "send_probe", dies)
        pair.outgoing.add(pair.peer)
        async with asyncio.timeout(DEADLINE_S):
            await granted.wait()
            pair.outgoing.drop(pair.peer)
            receiver = pair.incoming.receiver_of(PREFILL.writer)
            pair.incoming.drop(PeerInfo("prefill-0", "a1", Role.PREFILL, ""))
            while receiver._intake:  # type: ignore[attr-defined]  # noqa: ASYNC110  # its task ends soon
                await asyncio.sleep(0)
    assert pair.linked == []


def test_a_link_has_so_many_tries_and_all_of_them_anew_once_it_held() -> None:
    reopening = Reopening((1.0, 4.0))
    assert [reopening.failed(now) for now in (0.0, 1.0, 5.0)] == [1.0, 4.0, None]
    flapping = Reopening((1.0,))
    assert flapping.failed(0.0) == 1.0
    flapping.opened(1.0)
    assert flapping.failed(1.5) is None
    steady = Reopening((1.0,))
    assert steady.failed(0.0) == 1.0
    steady.opened(1.0)
    assert steady.failed(1.0 + outgoing.HELD_S) == 1.0


async def test_a_lost_worker_whose_process_lives_may_still_write_until_it_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incoming, "TWO_SIDED", frozenset())
    life = Life(PREFILL)
    pair = Pair(TransportName.LOOPBACK, ())
    pair.settings = dataclasses.replace(pair.settings, life=life.name)
    pair.outgoing = pair.links("model")
    pair.outgoing.add(pair.peer)
    assert isinstance(await pair.report(), LinkReady)
    assert not pair.incoming.drop(WRITER)
    assert pair.incoming.departed() == []
    life.close()
    assert pair.incoming.departed() == [(PREFILL.worker_id, PREFILL.incarnation)]
    assert pair.incoming.departed() == []
    assert pair.incoming.drop(WRITER)
    await pair.close()
