"""The fault injector, around loopback: what each fault does, and that it is the same for the same seed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from twinpool.config import TransportName
from twinpool.errors import PeerLost
from twinpool.kv_transfer import pushes, transports
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.kv_transfer.faulty import FaultPlan, FaultySender
from twinpool.kv_transfer.loopback import LoopbackReceiver, LoopbackSender
from twinpool.kv_transfer.probe import FIRST_PROBE_FENCE
from twinpool.layout import Dtype, KVLayout

LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=8, dtype=Dtype.FLOAT32)
NUM_BLOCKS = 8
END = LocalEnd("prefill-0", "a1")
ALL = list(range(NUM_BLOCKS))


def region(fill: int) -> KVRegion:
    return KVRegion(memoryview(bytearray([fill]) * (NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)


@pytest.fixture
async def receiver() -> AsyncIterator[LoopbackReceiver]:
    receiver = LoopbackReceiver(region(0))
    yield receiver
    await receiver.close()


async def faulty(receiver: LoopbackReceiver, spec: str, pool: KVRegion | None = None) -> FaultySender:
    source = pool or region(7)
    sender = await transports.sender(
        TransportName.LOOPBACK, receiver.address(), source, END, spec, seal=False
    )
    assert isinstance(sender, FaultySender)
    return sender


def push_layers(sender: FaultySender, fence: int) -> None:
    for layer in range(LAYOUT.num_layers):
        sender.push(fence, BlockRange(ALL, ALL, layer, layer + 1))


async def test_corruption_flips_bytes_on_the_way_and_leaves_the_source_alone() -> None:
    pool, target = region(7), region(0)
    receiver = LoopbackReceiver(target)
    sender = await faulty(receiver, "corrupt=1", pool)
    receiver.expect(1, END.writer, ALL)
    push_layers(sender, 1)
    report = await sender.finish(1)
    await receiver.arrived(1)
    wrong = np.frombuffer(target.memory, np.uint8) != 7
    assert wrong.sum() == LAYOUT.num_layers
    assert bytes(pool.memory) == bytes(region(7).memory)
    assert report.num_bytes == NUM_BLOCKS * LAYOUT.block_bytes
    await receiver.close()


async def test_dropped_pushes_never_arrive(receiver: LoopbackReceiver) -> None:
    sender = await faulty(receiver, "drop=1")
    receiver.expect(1, END.writer, ALL)
    push_layers(sender, 1)
    assert (await sender.finish(1)).num_bytes == 0
    assert sender.num_faults["drop"] == LAYOUT.num_layers


async def test_a_stalled_fence_ends_only_with_its_stop(receiver: LoopbackReceiver) -> None:
    sender = await faulty(receiver, "stall=1")
    receiver.expect(1, END.writer, ALL)
    push_layers(sender, 1)
    finishing = asyncio.create_task(sender.finish(1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not finishing.done()
    await sender.stop(1)
    with pytest.raises(PeerLost, match="stalled"):
        await finishing


async def test_a_stall_that_nobody_stops_loses_the_link(
    receiver: LoopbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "STALL_S", 0.0)
    sender = await faulty(receiver, "stall=1")
    receiver.expect(1, END.writer, ALL)
    push_layers(sender, 1)
    with pytest.raises(PeerLost, match="stalled for 0 s"):
        await sender.finish(1)
    assert sender.lost
    with pytest.raises(PeerLost, match="stalled for 0 s"):
        push_layers(sender, 2)


async def test_a_fault_link_that_opens_half_way_is_closed_again(receiver: LoopbackReceiver) -> None:
    opened: list[LoopbackSender] = []

    async def connect(pool: KVRegion) -> LoopbackSender:
        if opened:
            raise PeerLost("no second link")
        opened.append(LoopbackSender(receiver.address(), pool, END))
        return opened[0]

    with pytest.raises(PeerLost, match="no second link"):
        await FaultySender.open(FaultPlan(), region(7), connect)
    assert opened[0].lost == "the link was closed"


async def test_a_dead_link_stays_dead(receiver: LoopbackReceiver) -> None:
    sender = await faulty(receiver, "death=1")
    assert sender.lost is None
    with pytest.raises(PeerLost, match="injected"):
        push_layers(sender, 1)
    with pytest.raises(PeerLost, match="injected"):
        await sender.finish(1)
    assert sender.lost == "the link died (injected fault)"
    await sender.stop(1)
    await sender.close()


async def test_the_same_seed_breaks_the_same_pushes(receiver: LoopbackReceiver) -> None:
    counts = []
    for _ in range(2):
        sender = await faulty(receiver, "drop=0.5,seed=11")
        for fence in range(20):
            push_layers(sender, fence)
        counts.append(sender.num_faults["drop"])
    assert counts[0] == counts[1]
    assert 20 < counts[0] < 60


async def test_a_late_push_reads_its_source_when_it_goes_out() -> None:
    pool, target = region(7), region(0)
    receiver = LoopbackReceiver(target)
    sender = await faulty(receiver, "late=0.01", pool)
    receiver.expect(1, END.writer, ALL)
    push_layers(sender, 1)
    pool.memory[:] = bytes([9]) * len(pool.memory)
    report = await sender.finish(1)
    await receiver.arrived(1)
    assert report.num_bytes == NUM_BLOCKS * LAYOUT.block_bytes
    assert 9 in bytes(target.memory)
    await sender.close()
    await receiver.close()


async def test_what_is_held_back_under_a_stopped_fence_never_goes_out() -> None:
    target = region(0)
    receiver = LoopbackReceiver(target)
    sender = await faulty(receiver, "late=1000")
    receiver.expect(1, END.writer, ALL)
    push_layers(sender, 1)
    await sender.stop(1)
    assert bytes(target.memory) == bytes(region(0).memory)
    push_layers(sender, 1)
    waiting = asyncio.create_task(sender.finish(1))
    await asyncio.sleep(0)
    await sender.close()
    with pytest.raises(PeerLost):
        await waiting
    with pytest.raises(PeerLost):
        push_layers(sender, 1)
    await receiver.close()


async def test_a_probe_crosses_a_link_that_breaks_everything_else(receiver: LoopbackReceiver) -> None:
    sender = await faulty(receiver, "drop=1,corrupt=1,stall=1,death=1")
    fence = FIRST_PROBE_FENCE + 1
    receiver.expect(fence, END.writer, ALL)
    push_layers(sender, fence)
    report = await sender.finish(fence)
    await receiver.arrived(fence)
    assert report.num_bytes == NUM_BLOCKS * LAYOUT.block_bytes
    assert not sender.num_faults
    await sender.close()
