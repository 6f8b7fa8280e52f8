"""A receiver of KV in the test's process, and the peers that write to it: processes of their own (`transport_peer.py`).

`loopback`, which has no other process, runs both ends here. The peers are forked from a process that has imported
everything, as importing is what would take long.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from support import transport_peer
from support.transport_peer import LAYOUT, NUM_BLOCKS
from twinpool.config import TransportName
from twinpool.errors import PeerLost
from twinpool.kv_transfer import shm_pool, transports
from twinpool.kv_transfer.connector import KVReceiver, KVRegion, LocalEnd
from twinpool.kv_transfer.manifest import digests

DEADLINE_S = 30.0
UNTOUCHED = 0xA5
LAYERS = LAYOUT.num_layers
HALF = 7
"""The first layers of a block that go in a message of their own by ucx; those that are left are fewer."""
DEPLOYMENT = f"test{os.getpid()}"
TESTS = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([transport_peer.__name__])


class RemotePeer:
    """A peer process. Calling a command raises PeerLost or AssertionError for the errors it answers with."""

    def __init__(self, transport: str, worker_id: str) -> None:
        path = os.pathsep.join((str(TESTS.parent / "src"), str(TESTS)))
        with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
            forkserver.ensure_running()
        ours, theirs = socket.socketpair()
        self.process = FORKS.Process(
            target=transport_peer.run, args=(theirs, transport, worker_id, DEPLOYMENT), daemon=True
        )
        with theirs:
            self.process.start()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._socket = ours

    @classmethod
    async def start(cls, transport: str, worker_id: str) -> RemotePeer:
        peer = cls(transport, worker_id)
        peer._reader, peer._writer = await asyncio.open_connection(sock=peer._socket)
        return peer

    async def call(self, name: str, **arguments: Any) -> Any:
        self._writer.write(json.dumps([name, arguments]).encode() + b"\n")
        async with asyncio.timeout(DEADLINE_S):
            answer = json.loads(await self._reader.readline())
        if error := answer.get("error"):
            raise PeerLost(error) if error.startswith("PeerLost") else AssertionError(error)
        return answer["value"]

    def freeze(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.join)
        self._writer.close()


class LocalPeer:
    """The same commands in this process, for loopback."""

    def __init__(self, transport: str, worker_id: str) -> None:
        self.peer = transport_peer.Peer(transport, worker_id, DEPLOYMENT)

    async def call(self, name: str, **arguments: Any) -> Any:
        return await getattr(self.peer, name)(**arguments)

    async def kill(self) -> None:
        await self.peer.close()


AnyPeer = RemotePeer | LocalPeer


class Desk:
    """A receiver in this process, and the peers that write to it."""

    def __init__(self, name: str, incarnation: str = "a1") -> None:
        name, _, how = name.partition(" ")
        self.name = TransportName(name)
        self.is_sealed = how == "sealed"
        self.end = LocalEnd("decode-0", incarnation, DEPLOYMENT)
        self.shared = (
            shm_pool.SharedPool(NUM_BLOCKS * LAYOUT.block_bytes, self.end) if name == "shm" else None
        )
        memory = self.shared.memory if self.shared else memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
        self.region = KVRegion(memory, LAYOUT, NUM_BLOCKS)
        self.blocks = np.frombuffer(memory, dtype=np.uint8).reshape(NUM_BLOCKS, -1)
        self.blocks[:] = UNTOUCHED
        self.receiver: KVReceiver
        self.peers: list[AnyPeer] = []
        self.writers: dict[int, str] = {}

    async def sender(self, seed: int = 1, faults: str = "") -> AnyPeer:
        """A connected peer whose pool is filled after `seed`."""
        worker_id = f"prefill-{len(self.peers)}"
        peer: AnyPeer
        if self.name is TransportName.LOOPBACK:
            peer = LocalPeer(self.name, worker_id)
        else:
            peer = await RemotePeer.start(self.name, worker_id)
        self.peers.append(peer)
        address = self.receiver.address().hex()
        self.writers[id(peer)] = await peer.call("connect", address=address, seed=seed, faults=faults)
        return peer

    def expect(self, fence: int, peer: AnyPeer, blocks: Sequence[int]) -> None:
        self.receiver.expect(fence, self.writers[id(peer)], blocks)

    async def transfer(self, fence: int, peer: AnyPeer, source: Sequence[int], target: Sequence[int]) -> None:
        """A whole transfer that must go well."""
        self.expect(fence, peer, target)
        await peer.call("push", fence=fence, source=source, target=target, first=0, last=LAYERS)
        assert await peer.call("finish", fence=fence) == len(source) * LAYOUT.block_bytes
        async with asyncio.timeout(DEADLINE_S):
            await self.receiver.arrived(fence)
        self.receiver.forget(fence)
        assert await peer.call("digests", blocks=source) == list(digests(self.region, target))

    async def close(self) -> None:
        for peer in self.peers:
            await peer.kill()
        await self.receiver.close()
        if self.shared is not None:
            del self.blocks, self.region
            self.shared.close()


def require(name: str) -> None:
    if (reason := transports.available()[TransportName(name)]) is not None:
        pytest.skip(f"{name} is not usable here: {reason}")
