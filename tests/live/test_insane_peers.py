"""Workers that know the join token and talk nonsense to each other: links fail with a reason, no worker does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import junk
from support.join_token import TEST_TOKEN

from twinpool.channel import DealerChannel, RouterChannel
from twinpool.config import Encryption, Role, TransportName
from twinpool.errors import ProtocolError
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.kv_transfer.loopback import LoopbackSender
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import (
    LinkFailed,
    LinkReady,
    Message,
    PeerHello,
    PeerInfo,
    PeerUnknown,
    PeerWelcome,
    ProbeAck,
    ProbeGrant,
    ProbeRequest,
    ProbeSeal,
    Renew,
    Revoke,
    RevokeAck,
    Seal,
)
from twinpool.worker import outgoing
from twinpool.worker.core import Event
from twinpool.worker.incoming import IncomingLinks
from twinpool.worker.links import LinkSettings, LocalPool
from twinpool.worker.outgoing import OutgoingLinks

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=8, dtype=Dtype.FLOAT32)
NUM_BLOCKS = 4
PREFILL, DECODE = LocalEnd("prefill-0", "a1"), LocalEnd("decode-0", "b1")
LOOPBACK = TransportName.LOOPBACK
DEADLINE_S = 20.0


class Tasks:
    """The tasks of one worker: none may fail."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))
        return self._tasks[-1]

    async def end(self) -> None:
        """Cancels them; those that failed fail the test."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert not [exc for exc in results if isinstance(exc, Exception)]


def pool() -> LocalPool:
    memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
    return LocalPool(KVRegion(memory, LAYOUT, NUM_BLOCKS), None, (NUM_BLOCKS - 1,), "model")


def settings_of(end: LocalEnd, wanted: TransportName = LOOPBACK) -> LinkSettings:
    return LinkSettings(end, "host", wanted, (LOOPBACK, TransportName.TCP), TEST_TOKEN, reopen_pauses_s=())


def welcome(transport: TransportName, address: bytes, incarnation: str = "b1") -> PeerWelcome:
    return PeerWelcome("decode-0", incarnation, transport, address, "host")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((), "has not answered"),
        ((ProbeGrant(1, (1,)), ProbeAck(1), Revoke(("r", 1), 7)), "has not answered"),  # type: ignore[arg-type]
        ((welcome(TransportName.UCX, b"x"),), "wants ucx, which was not offered"),
        ((welcome(TransportName.AUTO, b"x"),), "wants auto, which was not offered"),
        ((welcome(TransportName.TCP, b"junk"),), "not an address"),
        ((welcome(LOOPBACK, b"junk"),), "no loopback receiver"),
        ((welcome(LOOPBACK, b"junk", incarnation="b2"),), "another process"),
    ],
)
async def test_an_insane_decode_worker_costs_a_link_and_nothing_else(
    answers: Sequence[Message], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "ANSWER_LIMIT_S", 0.3)
    reports: asyncio.Queue[Message] = asyncio.Queue()
    events: list[Event] = []
    tasks = Tasks()

    def insane(identity: str, message: Message) -> None:
        for answer in answers if isinstance(message, PeerHello) else ():
            decode_worker.send(identity, answer)

    with RouterChannel("tcp://127.0.0.1:*", TEST_TOKEN, insane, fail) as decode_worker:
        links = OutgoingLinks(
            pool(), settings_of(PREFILL), events.append, reports.put_nowait, fail, tasks.spawn
        )
        links.add(PeerInfo("decode-0", "b1", Role.DECODE, decode_worker.endpoint))
        async with asyncio.timeout(DEADLINE_S):
            failed = await reports.get()
        assert isinstance(failed, LinkFailed)
        assert reason in failed.reason
        assert links.senders == {}
        await tasks.end()
        await links.close()


async def test_a_probe_of_more_blocks_than_there_are_is_refused() -> None:
    reports: asyncio.Queue[Message] = asyncio.Queue()
    tasks = Tasks()
    real = IncomingLinks(
        "tcp://127.0.0.1:*", pool(), settings_of(DECODE), nothing, nothing, fail, tasks.spawn
    )

    def insane(identity: str, message: Message) -> None:
        if isinstance(message, PeerHello):
            address = real._receivers[LOOPBACK, False].address()
            decode_worker.send(identity, welcome(LOOPBACK, address))
        elif isinstance(message, ProbeRequest):
            decode_worker.send(identity, ProbeGrant(1, tuple(range(100))))

    real.add(PeerInfo("prefill-9", "z", Role.PREFILL, ""))
    await real._welcome("prefill-9/z", hello(LocalEnd("prefill-9", "z")))
    with RouterChannel("tcp://127.0.0.1:*", TEST_TOKEN, insane, fail) as decode_worker:
        links = OutgoingLinks(pool(), settings_of(PREFILL), nothing, reports.put_nowait, fail, tasks.spawn)
        links.add(PeerInfo("decode-0", "b1", Role.DECODE, decode_worker.endpoint))
        async with asyncio.timeout(DEADLINE_S):
            failed = await reports.get()
        assert isinstance(failed, LinkFailed)
        assert "100 blocks were granted for a probe of 1" in failed.reason
        await tasks.end()
        await links.close()
        await real.close()


def hello(end: LocalEnd, **changes: Any) -> PeerHello:
    values: dict[str, Any] = {
        "worker_id": end.worker_id, "incarnation": end.incarnation, "fingerprint": "model", "layout": LAYOUT,
        "transport": LOOPBACK, "transports": (LOOPBACK,), "host": "host", "encryption": Encryption.AUTO,
    }  # fmt: skip
    return PeerHello(**values | changes)


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(
    said=st.lists(junk.messages(PeerHello, ProbeRequest, ProbeSeal, Renew, Seal, RevokeAck), max_size=6),
    digests=st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple),
)
def test_an_insane_prefill_worker_costs_a_decode_worker_nothing(
    said: list[Message], digests: tuple[int, ...]
) -> None:
    asyncio.run(rant(said, digests))


async def rant(said: list[Message], digests: tuple[int, ...]) -> None:
    """One who has joined says all this, and then a sane one opens its link."""
    answers: asyncio.Queue[Message] = asyncio.Queue()
    reports: asyncio.Queue[Message] = asyncio.Queue()
    tasks = Tasks()
    incoming = IncomingLinks(
        "tcp://127.0.0.1:*", pool(), settings_of(DECODE), nothing, nothing, nothing, tasks.spawn
    )
    mad = LocalEnd("prefill-9", "z")
    for end in (mad, PREFILL):
        incoming.add(PeerInfo(end.worker_id, end.incarnation, Role.PREFILL, ""))
    with DealerChannel(
        incoming.endpoint, mad.writer, TEST_TOKEN, lambda _, answer: answers.put_nowait(answer), fail
    ) as channel:
        async with asyncio.timeout(DEADLINE_S):
            for message in (*said[:3], hello(mad)):
                channel.send(message)
            while not isinstance(welcomed := await answers.get(), PeerWelcome):
                pass
            sender = LoopbackSender(welcomed.address, pool().region, mad)
            for message in (ProbeRequest(7), *said[3:]):
                channel.send(message)
            while not isinstance(granted := await answers.get(), ProbeGrant):
                pass
            sender.push(granted.fence, BlockRange([0], granted.block_ids, 0, LAYOUT.num_layers))
            channel.send(ProbeSeal(granted.fence, digests))
            while not isinstance(ack := await answers.get(), ProbeAck):
                pass
            assert ack.error
            links = OutgoingLinks(
                pool(), settings_of(PREFILL), nothing, reports.put_nowait, fail, tasks.spawn
            )
            links.add(PeerInfo("decode-0", "b1", Role.DECODE, incoming.endpoint))
            assert isinstance(await reports.get(), LinkReady)
    await tasks.end()
    await links.close()
    await incoming.close()


async def test_who_is_no_member_is_told_so_and_leaves_nothing_behind() -> None:
    answers: asyncio.Queue[Message] = asyncio.Queue()
    tasks = Tasks()
    incoming = IncomingLinks(
        "tcp://127.0.0.1:*", pool(), settings_of(DECODE), nothing, nothing, fail, tasks.spawn
    )
    for end in (LocalEnd(f"prefill-{number}", "made-up") for number in range(8)):
        with DealerChannel(
            incoming.endpoint, end.writer, TEST_TOKEN, lambda _, answer: answers.put_nowait(answer), fail
        ) as channel:
            async with asyncio.timeout(DEADLINE_S):
                channel.send(hello(end))
                assert await answers.get() == PeerUnknown()
    assert incoming._writers == {}
    assert incoming._receivers == {}
    await tasks.end()
    await incoming.close()


def nothing(*_: object) -> None:
    """Takes what comes."""


def fail(identity: str, error: ProtocolError) -> None:
    raise AssertionError((identity, error))
