"""One end of a KV link, in a process of its own: `transport_desk.py` starts and drives it.

Reads one JSON command a line from a socket and answers each with one JSON line: a value, or the name of an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from twinpool.config import TransportName
from twinpool.errors import TwinpoolError
from twinpool.kv_transfer import transports
from twinpool.kv_transfer.connector import BlockRange, KVReceiver, KVRegion, KVSender, LocalEnd
from twinpool.kv_transfer.manifest import digests
from twinpool.kv_transfer.shm_pool import SharedPool
from twinpool.layout import Dtype, KVLayout

LAYOUT = KVLayout(num_layers=13, num_kv_heads=5, head_dim=64, block_size=16, dtype=Dtype.BFLOAT16)
NUM_BLOCKS = 24


def fill(region: KVRegion, seed: int, first: int, last: int) -> None:
    """Fills layers [first, last) of every block with bytes that depend on `seed`."""
    for block in range(region.num_blocks):
        start, length = region.layout.layer_range(block, first, last)
        region.memory[start : start + length] = np.random.default_rng((seed, block, first)).bytes(length)


class Peer:
    """The commands. Each method named like a command answers with a JSON value."""

    def __init__(self, transport: str, worker_id: str, deployment: str) -> None:
        self.transport = TransportName(transport)
        self.end = LocalEnd(worker_id, f"{os.getpid():x}", deployment)
        self.shared: SharedPool | None = None
        self.region = KVRegion(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)
        self.sender: KVSender
        self.receiver: KVReceiver

    async def connect(self, address: str, seed: int, faults: str = "") -> str:
        fill(self.region, seed, 0, LAYOUT.num_layers)
        self.sender = await transports.sender(
            self.transport, bytes.fromhex(address), self.region, self.end, faults, seal=False
        )
        return self.end.writer

    async def listen(self) -> str:
        if self.transport is TransportName.SHM:
            self.shared = SharedPool(NUM_BLOCKS * LAYOUT.block_bytes, self.end)
            self.region = KVRegion(self.shared.memory, LAYOUT, NUM_BLOCKS)
        self.receiver = await transports.receiver(
            self.transport, self.region, self.end, self.shared, seal=False
        )
        return self.receiver.address().hex()

    async def expect(self, fence: int, writer: str, blocks: list[int]) -> None:
        self.receiver.expect(fence, writer, blocks)

    async def push(self, fence: int, source: list[int], target: list[int], first: int, last: int) -> None:
        for layer in range(first, last, self.sender.layer_group):
            end = min(layer + self.sender.layer_group, last)
            await asyncio.to_thread(self.sender.push, fence, BlockRange(source, target, layer, end))

    async def prefill(self, fence: int, source: list[int], target: list[int], seed: int) -> None:
        """Computes layer group after layer group, pushing each as soon as it is there."""
        for layer in range(0, LAYOUT.num_layers, self.sender.layer_group):
            last = min(layer + self.sender.layer_group, LAYOUT.num_layers)
            fill(self.region, seed, layer, last)
            await self.push(fence, source, target, layer, last)

    async def finish(self, fence: int) -> int:
        return (await self.sender.finish(fence)).num_bytes

    async def stop(self, fence: int) -> None:
        await self.sender.stop(fence)

    async def digests(self, blocks: list[int]) -> list[int]:
        return list(digests(self.region, blocks))

    async def close(self) -> None:
        await self.sender.close()


def run(desk: socket.socket, *who: str) -> None:
    """Does what is asked through `desk` until nobody is there any more."""
    asyncio.run(_answer(desk, Peer(*who)))


async def _answer(desk: socket.socket, peer: Peer) -> None:
    reader, writer = await asyncio.open_connection(sock=desk)
    while line := await reader.readline():
        name, arguments = json.loads(line)
        command: Callable[..., Awaitable[Any]] = getattr(peer, name)
        try:
            answer = {"value": await command(**arguments)}
        except TwinpoolError as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
