"""KV of a prompt from this process into the pool of another, by transport, beside one memcpy of the same bytes or UCX's
own benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from twinpool.bench.engine.ceilings import Copying
from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.perftest import Perftest
from twinpool.bench.engine.timing import CpuTimer
from twinpool.config import TransportName
from twinpool.engine.host_memory import host_memory
from twinpool.errors import TransferError
from twinpool.kv_transfer import transports
from twinpool.kv_transfer.connector import BlockRange, KVRegion, KVSender, LocalEnd
from twinpool.kv_transfer.ucx_worker import layers_per_message
from twinpool.layout import KVLayout

MEASURED = (TransportName.SHM, TransportName.UCX, TransportName.TCP)
LIMIT_S = 30.0
_SPARE = 2
"""The pools have so many times the blocks that one transfer takes, so that those can lie anywhere."""


def transfers(
    bench: Bench, layout: KVLayout, prompts: Sequence[int], core: int | None, skipped: dict[str, str]
) -> None:
    """Measures prompts of so many tokens over each transport that works here. The other end runs on `core`.

    Raises:
        TransferError: the other end did not answer, or the bytes did not arrive.
    """
    reasons = transports.available()
    perftest = Perftest.find(layers_per_message(layout) * layout.layer_bytes, core)
    with asyncio.Runner() as loop:
        for name in MEASURED:
            if (reason := reasons[name]) is not None:
                skipped[f"transfer by {name}"] = reason
                continue
            if name is TransportName.UCX and perftest is None:
                skipped["UCX beside its own benchmark"] = "ucx_perftest is not installed; memcpy is its floor"
            try:
                loop.run(_measure(bench, name, layout, prompts, core, perftest))
            except TimeoutError as exc:
                raise TransferError(f"{name}: the other end did not answer within {LIMIT_S:.0f} s") from exc


async def _measure(
    bench: Bench,
    name: TransportName,
    layout: KVLayout,
    prompts: Sequence[int],
    core: int | None,
    perftest: Perftest | None,
) -> None:
    num_blocks = _SPARE * max(layout.num_blocks(prompt) for prompt in prompts)
    async with link(name, _random_pool(layout, num_blocks), num_blocks, core) as far:
        loop = asyncio.get_running_loop()
        for prompt in prompts:
            count = layout.num_blocks(prompt)
            num_bytes = count * layout.block_bytes

            def run_s(count: int = count) -> float:
                return asyncio.run_coroutine_threadsafe(far.move_s(count), loop).result(LIMIT_S)

            floor, floor_s = "memcpy", _copy_s(num_bytes)
            if name is TransportName.UCX and perftest is not None:
                floor, floor_s = "ucx_perftest", partial(perftest.seconds, num_bytes)
            await asyncio.to_thread(
                bench.against,
                "transfer",
                f"{name}, {prompt} tokens",
                run_s,
                floor,
                floor_s,
                num_bytes / 1e9,
                "GB",
            )


def _copy_s(num_bytes: int) -> Callable[[], float]:
    copying, timer = Copying(num_bytes), CpuTimer()
    return lambda: timer.seconds(copying)


def _random_pool(layout: KVLayout, num_blocks: int) -> KVRegion:
    memory = host_memory(num_blocks * layout.block_bytes)
    memory[:] = os.urandom(layout.block_bytes) * num_blocks
    return KVRegion(memory, layout, num_blocks)


class Link:
    """This process's sender, out of `region`, and the other end's receiver, which it steers: a pool of `num_blocks`."""

    def __init__(self, process: asyncio.subprocess.Process, region: KVRegion, num_blocks: int) -> None:
        self._process = process
        self._random = np.random.default_rng(0)
        self._num_blocks = num_blocks
        self._fence = 0
        self.region = region
        self.end = LocalEnd("bench-sender", f"{os.getpid():x}")
        self.sender: KVSender

    async def ask(self, command: str, **arguments: Any) -> Any:
        """One command to the other end. Raises TransferError."""
        assert self._process.stdin is not None, "it was piped"
        assert self._process.stdout is not None, "it was piped"
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        async with asyncio.timeout(LIMIT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise TransferError("the other end of the link has ended; its error is above")
        return json.loads(line)

    async def expect(self, count: int) -> tuple[int, list[int]]:
        """A new fence, and so many blocks of the other end, anywhere, that may be written under it."""
        self._fence += 1
        target = self._random.permutation(self._num_blocks)[:count].tolist()
        await self.ask("expect", fence=self._fence, writer=self.end.writer, blocks=target)
        return self._fence, target

    async def finish(self, fence: int) -> None:
        """Waits until the transport has delivered what was pushed under `fence`, and the other end has all of it."""
        await self.delivered(fence)
        await self.ask("arrived", fence=fence)

    async def delivered(self, fence: int) -> None:
        """Waits until the transport has delivered what was pushed under `fence`."""
        async with asyncio.timeout(LIMIT_S):
            await self.sender.finish(fence)

    async def move_s(self, count: int) -> float:
        """Seconds in which so many blocks from anywhere travel to anywhere, until the transport has delivered them."""
        source = self._random.permutation(self.region.num_blocks)[:count].tolist()
        fence, target = await self.expect(count)
        layers, group = self.region.layout.num_layers, self.sender.layer_group
        started = time.perf_counter()
        for first in range(0, layers, group):
            self.sender.push(fence, BlockRange(source, target, first, min(first + group, layers)))
        await self.delivered(fence)
        took_s = time.perf_counter() - started
        await self.ask("arrived", fence=fence)
        return took_s


@contextlib.asynccontextmanager
async def link(
    name: TransportName, region: KVRegion, num_blocks: int, core: int | None
) -> AsyncIterator[Link]:
    """A link out of `region` to a new process on `core` with a pool of `num_blocks`; both end with the context."""
    layout = region.layout
    shape = (
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        layout.dtype.value,
        num_blocks,
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twinpool.bench.engine.link_end", name, json.dumps(shape), json.dumps(core),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        far = Link(process, region, num_blocks)
        address = bytes.fromhex(await far.ask("listen"))
        far.sender = await transports.sender(name, address, region, far.end, seal=False)
        try:
            yield far
        finally:
            await far.sender.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
