"""What a worker's transfers remember while they run, and that it is nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.kv_transfer.loopback import LoopbackReceiver, LoopbackSender
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Manifest
from twinpool.request import RequestKey
from twinpool.worker.core import (
    BlockPush,
    Event,
    FinishPush,
    Push,
    PushFailed,
    PushFinished,
    PushStopped,
    StopPush,
    Verified,
    Verify,
)
from twinpool.worker.links import LocalPool
from twinpool.worker.step_thread import StepResult, StepThread
from twinpool.worker.transfers import Transfers

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=8, dtype=Dtype.FLOAT32)
NUM_BLOCKS = 4
PUSH = BlockPush(9, "decode-0", (0, 1), (2, 3))


class NoRunner:
    """No model: these tests push only."""

    def run(self, batch: StepBatch, on_layer_done: object = None) -> StepOutput:
        raise NotImplementedError


class Bench:
    """A prefill worker's transfers over loopback."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.receiver = LoopbackReceiver(region())
        self.receiver.expect(9, "prefill-0/a1", PUSH.target_blocks)
        source = region()
        self.sender = LoopbackSender(self.receiver.address(), source, LocalEnd("prefill-0", "a1"))
        senders = {"decode-0": self.sender}
        self._steps = StepThread(NoRunner(), LAYOUT.num_layers, senders, _no_step)
        pool = LocalPool(source, None, (), "model")
        self.transfers = Transfers(pool, self._steps, senders, None, self.events.append, self._spawn)

    async def settle(self) -> None:
        """Waits for all that was begun."""
        async with asyncio.timeout(10):
            while self._tasks:
                await self._tasks.pop()

    async def close(self) -> None:
        assert not self.transfers._pushes
        self._steps.close()
        await self.receiver.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.append(task)
        return task


def _no_step(result: StepResult) -> None:
    raise NotImplementedError


def region() -> KVRegion:
    return KVRegion(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)


async def test_a_push_and_its_end_leave_nothing_behind() -> None:
    bench = Bench()
    bench.transfers.carry_out(Push(PUSH))
    bench.transfers.carry_out(FinishPush(9, "decode-0", PUSH.source_blocks))
    await bench.settle()
    (finished,) = bench.events
    assert isinstance(finished, PushFinished)
    assert finished.num_bytes == 2 * LAYOUT.block_bytes
    await bench.close()


async def test_a_push_that_fails_is_remembered_no_longer_though_nobody_finishes_or_stops_it() -> None:
    bench = Bench()
    await bench.sender.close()
    bench.transfers.carry_out(Push(PUSH))
    await bench.settle()
    assert bench.events == [PushFailed(9, "the link was closed")]
    await bench.close()


async def test_a_stop_is_answered_after_the_pushes_that_were_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def slow(_push: BlockPush) -> Awaitable[None]:
        return begun

    monkeypatch.setattr(bench._steps, "push", slow)
    bench.transfers.carry_out(Push(PUSH))
    bench.transfers.carry_out(StopPush(9, "decode-0"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.events == []
    begun.set_result(None)
    await bench.settle()
    assert bench.events == [PushStopped(9)]
    bench.sender.push(9, BlockRange(PUSH.source_blocks, PUSH.target_blocks, 0, 1))
    assert len(bench.sender._log) == 0
    await bench.close()


async def test_a_push_without_a_link_fails() -> None:
    bench = Bench()
    stray = BlockPush(9, "decode-7", (0,), (1,))
    bench.transfers.carry_out(Push(stray))
    await bench.settle()
    assert bench.events == [PushFailed(9, "no link to decode-7")]
    with pytest.raises(PeerLost):
        await bench._steps.push(stray)
    await bench.close()


async def test_blocks_that_arrive_changed_are_counted() -> None:
    bench = Bench()
    bench.transfers.carry_out(Push(PUSH))
    bench.transfers.carry_out(FinishPush(9, "decode-0", PUSH.source_blocks))
    await bench.settle()
    (finished,) = bench.events
    assert isinstance(finished, PushFinished)
    bench.transfers._expected[9] = (bench.receiver, PUSH.target_blocks)
    manifest = Manifest(
        key=RequestKey("r", 1), fence=9, fingerprint="model", layout=LAYOUT, num_tokens=16,
        block_ids=PUSH.target_blocks, digests=(finished.digests[0], finished.digests[1] ^ 1),
        first_token=5, num_bytes=finished.num_bytes, transfer_s=finished.transfer_s,
    )  # fmt: skip
    bench.transfers.carry_out(Verify(manifest, timeout_s=10.0))
    await bench.settle()
    verified = bench.events[1]
    assert isinstance(verified, Verified)
    assert verified.num_mismatched == 1
    assert "1 of 2 KV blocks differ" in verified.error
    await bench.close()
