"""What handing over its KV adds to a prompt: the same step with pushes and without, in turns."""

from __future__ import annotations

import asyncio
import time

from twinpool.bench.engine.floors import Piece
from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.model_bed import ModelBed
from twinpool.bench.engine.timing import CpuTimer
from twinpool.bench.engine.transfers import LIMIT_S, MEASURED, link
from twinpool.config import TransportName
from twinpool.engine.batch import LayerGroupsDone
from twinpool.errors import TransferError
from twinpool.kv_transfer import transports
from twinpool.kv_transfer.connector import KVRegion
from twinpool.worker.core import BlockPush
from twinpool.worker.step_thread import LayerPusher


def pushing(bench: Bench, bed: ModelBed, length: int, core: int | None, skipped: dict[str, str]) -> None:
    """Measures a prompt of `length` tokens over each transport that works here. The other end runs on `core`.

    Raises:
        TransferError: the other end did not answer, or a push failed.
    """
    if bed.runner.device.type != "cpu":
        skipped["pushing"] = "only of a model on a CPU so far"
        return
    reasons = transports.available()
    with asyncio.Runner() as loop:
        for name in MEASURED:
            if (reason := reasons[name]) is not None:
                skipped[f"pushing by {name}"] = reason
                continue
            loop.run(_measure(bench, bed, name, length, core))


async def _measure(bench: Bench, bed: ModelBed, name: TransportName, length: int, core: int | None) -> None:
    runner, timer = bed.runner, CpuTimer()
    batch = bed.step([Piece(0, length)])
    source = tuple(batch.slices[0].block_table)
    region = KVRegion(runner.memory, runner.layout, runner.num_blocks)
    async with link(name, region, len(source), core) as far:
        loop = asyncio.get_running_loop()

        def pushed_s() -> float:
            fence, target = asyncio.run_coroutine_threadsafe(far.expect(len(source)), loop).result(LIMIT_S)
            push = BlockPush(fence, "bench-receiver", source, tuple(target))
            pusher = LayerPusher([push], [far.sender], runner.layout.num_layers)
            started = time.perf_counter()
            runner.run(batch, LayerGroupsDone(pusher.last_layers, pusher.layer_done))
            took_s = time.perf_counter() - started
            if pusher.failed:
                raise TransferError(f"{name}: {pusher.failed[fence]}")
            asyncio.run_coroutine_threadsafe(far.finish(fence), loop).result(LIMIT_S)
            return took_s

        await asyncio.to_thread(
            bench.against,
            "push",
            f"{name}, prompt of {length} tokens",
            pushed_s,
            "not pushed",
            lambda: timer.seconds(lambda: runner.run(batch)),
            length,
            "tokens",
        )
