"""The contract of `kv_transfer/connector.py`, over every transport, between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from support.transport_desk import DEADLINE_S, DEPLOYMENT, HALF, LAYERS, UNTOUCHED, Desk
from support.transport_peer import LAYOUT, NUM_BLOCKS

from twinpool.config import TransportName
from twinpool.errors import DigestMismatch, PeerLost, TransferError
from twinpool.kv_transfer import probe, transports
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.kv_transfer.manifest import check_digests, digests

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def held_by_this_process() -> tuple[int, list[str], list[str]]:
    """Open file descriptors, threads of transports, and shared pools."""
    gc.collect()  # what earlier tests left to the collector
    pools = [path.name for path in Path("/dev/shm").glob(f"twinpool.{DEPLOYMENT}.*")]
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))
    return len(os.listdir("/proc/self/fd")), threads, pools


def scattered(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count]]


async def test_random_blocks_arrive_whole_and_no_other_block_is_touched(desk: Desk) -> None:
    peer = await desk.sender()
    target = scattered(2, 9)
    await desk.transfer(1, peer, scattered(1, 9), target)
    others = [block for block in range(NUM_BLOCKS) if block not in target]
    assert (desk.blocks[others] == UNTOUCHED).all()


async def test_layers_are_pushed_while_later_layers_are_computed(desk: Desk) -> None:
    peer = await desk.sender()
    source, target = [3, 4, 5, 9], [8, 2, 3, 4]
    desk.expect(1, peer, target)
    await peer.call("prefill", fence=1, source=source, target=target, seed=7)
    await peer.call("finish", fence=1)
    await desk.receiver.arrived(1)
    assert await peer.call("digests", blocks=source) == list(digests(desk.region, target))


async def test_arrival_is_not_reported_before_the_last_layer_is_there(desk: Desk) -> None:
    if desk.name is TransportName.SHM:
        pytest.skip("shm writes without the receiver's doing: there the seal tells of arrival")
    peer = await desk.sender()
    desk.expect(1, peer, [0, 1])
    waiting = asyncio.create_task(desk.receiver.arrived(1))
    await peer.call("push", fence=1, source=[4, 5], target=[0, 1], first=0, last=HALF)
    await peer.call("finish", fence=1)
    assert not waiting.done()
    await peer.call("push", fence=1, source=[4, 5], target=[0, 1], first=HALF, last=LAYERS)
    await peer.call("finish", fence=1)
    await waiting


async def test_a_stopped_fence_writes_nothing_any_more(desk: Desk) -> None:
    peer = await desk.sender()
    desk.expect(1, peer, [0, 1, 2])
    await peer.call("push", fence=1, source=[0, 1, 2], target=[0, 1, 2], first=0, last=HALF)
    await asyncio.gather(desk.receiver.cancel(1), peer.call("stop", fence=1))
    desk.blocks[:] = UNTOUCHED
    await peer.call("push", fence=1, source=[0, 1, 2], target=[0, 1, 2], first=HALF, last=LAYERS)
    await desk.transfer(2, peer, [5], [5])  # what had been on its way before this is through
    assert (np.delete(desk.blocks, 5, axis=0) == UNTOUCHED).all()


async def test_a_stop_in_the_midst_of_a_step_is_final_even_while_the_receiver_still_expects(
    desk: Desk,
) -> None:
    pool = KVRegion(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)
    source = np.frombuffer(pool.memory, dtype=np.uint8)
    end = LocalEnd("prefill-0", "b2")
    sender = await transports.sender(desk.name, desk.receiver.address(), pool, end, seal=desk.is_sealed)
    blocks = list(range(NUM_BLOCKS - 1))
    desk.receiver.expect(1, end.writer, blocks)

    writing, stopped = threading.Event(), threading.Event()

    def steps() -> None:
        steps_to_go = 3
        for step in itertools.count():
            source.fill(step % 251)  # so that a late write cannot go unseen
            for first in range(0, LAYERS, sender.layer_group):
                last = min(first + sender.layer_group, LAYERS)
                sender.push(1, BlockRange(blocks, blocks, first, last))
            if step == 3:
                writing.set()
            steps_to_go -= stopped.is_set()
            if steps_to_go == 0:
                return

    pushing = asyncio.create_task(asyncio.to_thread(steps))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(writing.wait)
        await sender.stop(1)
        after_stop = desk.blocks.copy()
        stopped.set()
        await pushing
        barrier = [NUM_BLOCKS - 1]
        desk.receiver.expect(2, end.writer, barrier)
        for first in range(0, LAYERS, sender.layer_group):
            sender.push(2, BlockRange([0], barrier, first, min(first + sender.layer_group, LAYERS)))
        await sender.finish(2)
        await desk.receiver.arrived(2)
    assert (desk.blocks[:-1] == after_stop[:-1]).all()
    desk.receiver.forget(2)
    await desk.receiver.cancel(1)
    await sender.close()


async def test_a_fence_that_only_the_receiver_cancelled_writes_nothing_where_that_can_be_had(
    desk: Desk,
) -> None:
    if desk.name is TransportName.SHM:
        pytest.skip("a mapped pool cannot be guarded: quarantine does that")
    peer = await desk.sender()
    desk.expect(1, peer, [0, 1, 2])
    await desk.receiver.cancel(1)
    await peer.call("push", fence=1, source=[0, 1, 2], target=[0, 1, 2], first=0, last=LAYERS)
    await peer.call("finish", fence=1)
    assert (desk.blocks == UNTOUCHED).all()
    assert desk.receiver.num_dropped > 0
    with pytest.raises(TransferError):
        await desk.receiver.arrived(1)


async def test_blocks_of_a_transfer_cancelled_half_way_serve_the_next_fence(desk: Desk) -> None:
    peer = await desk.sender()
    blocks = list(range(8))
    desk.expect(1, peer, blocks)
    await peer.call("push", fence=1, source=blocks, target=blocks, first=0, last=HALF)
    await asyncio.gather(desk.receiver.cancel(1), peer.call("stop", fence=1))
    with pytest.raises(TransferError):
        await desk.receiver.arrived(1)
    await desk.transfer(2, peer, [20, 3, 19, 7, 18, 4, 17, 2], blocks)


async def test_two_senders_write_at_the_same_time(desk: Desk) -> None:
    one, other = await desk.sender(seed=1), await desk.sender(seed=2)
    await asyncio.gather(
        desk.transfer(1, one, list(range(8)), list(range(0, 16, 2))),
        desk.transfer(2, other, list(range(8)), list(range(1, 16, 2))),
    )


async def test_a_sender_killed_half_way_leaves_the_receiver_able_to_serve_the_next(desk: Desk) -> None:
    victim = await desk.sender(seed=1)
    blocks = list(range(NUM_BLOCKS))
    desk.expect(1, victim, blocks)
    await victim.call("push", fence=1, source=blocks, target=blocks, first=0, last=HALF)
    await victim.kill()
    await desk.receiver.cancel(1)
    heir = await desk.sender(seed=2)
    await desk.transfer(2, heir, blocks, blocks)


async def test_a_hundred_transfers_leave_nothing_behind(desk: Desk) -> None:
    peer = await desk.sender()
    await desk.transfer(1, peer, [0], [0])
    before = held_by_this_process()
    for fence in range(2, 102):
        await desk.transfer(fence, peer, [fence % NUM_BLOCKS, 3], [5, fence % 5])
    assert held_by_this_process() == before
    for fence in range(1, 102):
        with pytest.raises(TransferError):
            await desk.receiver.arrived(fence)


async def test_a_storm_of_transfers_that_are_broken_off_leaves_nothing_behind(desk: Desk) -> None:
    peer = await desk.sender()
    await desk.transfer(1, peer, [0], [0])
    before = held_by_this_process()
    for fence in range(2, 82):
        desk.expect(fence, peer, [1, 2, 3])
        if layers := (0, HALF, LAYERS)[fence % 3]:  # none, some, all
            await peer.call("push", fence=fence, source=[4, 5, 6], target=[1, 2, 3], first=0, last=layers)
        await asyncio.gather(desk.receiver.cancel(fence), peer.call("stop", fence=fence))
    assert held_by_this_process() == before
    await desk.transfer(82, peer, [7, 8, 9], [1, 2, 3])
    for fence in range(1, 83):
        with pytest.raises(TransferError):
            await desk.receiver.arrived(fence)


async def test_what_was_meant_for_a_process_never_reaches_the_one_in_its_place(desk: Desk) -> None:
    """It has the same name, lends the same blocks to the same writer, and even under the same fence."""
    peer = await desk.sender()
    desk.expect(1, peer, [0, 1])
    await peer.call("push", fence=1, source=[4, 5], target=[0, 1], first=0, last=HALF)
    heir = Desk(desk.name, "a2")
    heir.receiver = await transports.receiver(
        heir.name, heir.region, heir.end, heir.shared, seal=heir.is_sealed
    )
    await desk.receiver.close()
    desk.receiver = heir.receiver
    heir.receiver.expect(1, desk.writers[id(peer)], [0, 1])
    with contextlib.suppress(PeerLost):
        await peer.call("push", fence=1, source=[4, 5], target=[0, 1], first=HALF, last=LAYERS)
    await peer.call("stop", fence=1)
    assert (heir.blocks == UNTOUCHED).all()
    await heir.receiver.cancel(1)
    if heir.shared is not None:
        await heir.close()


async def test_a_flipped_byte_is_found_by_the_digest(desk: Desk) -> None:
    peer = await desk.sender(faults="corrupt=1,seed=3")
    desk.expect(1, peer, [1, 2])
    await peer.call("push", fence=1, source=[6, 7], target=[1, 2], first=0, last=LAYERS)
    assert await peer.call("finish", fence=1) == 2 * LAYOUT.block_bytes
    await desk.receiver.arrived(1)
    with pytest.raises(DigestMismatch, match="1 of 2 KV blocks"):
        check_digests(desk.region, [1, 2], await peer.call("digests", blocks=[6, 7]))


async def test_the_probe_measures_and_verifies(desk: Desk) -> None:
    pool = KVRegion(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)
    end = LocalEnd("prefill-0", "b2")
    sender = await transports.sender(desk.name, desk.receiver.address(), pool, end, seal=desk.is_sealed)
    blocks = list(range(NUM_BLOCKS // 4))
    fence = probe.FIRST_PROBE_FENCE
    desk.receiver.expect(fence, end.writer, blocks)
    result = await probe.send_probe(sender, pool, fence, blocks, blocks, DEADLINE_S)
    await probe.check_probe(desk.receiver, desk.region, fence, blocks, result.digests, DEADLINE_S)
    desk.receiver.forget(fence)
    assert result.num_bytes == len(blocks) * LAYOUT.block_bytes
    assert result.gb_per_s > 0
    await sender.close()
