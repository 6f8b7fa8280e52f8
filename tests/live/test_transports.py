"""The contract of `kv_transfer/connector.py`, over every transport, between real processes.

The receiver lives in the test's process, senders in processes of their own (`transport_peer.py`); `loopback`, which
has no other process, runs both ends here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from twinpool.config import TransportName
from twinpool.errors import ConfigError, DigestMismatch, PeerLost, TransferError, TransportUnavailable
from twinpool.kv_transfer import probe, pushes, shm, shm_pool, transports
from twinpool.kv_transfer.connector import BlockRange, KVReceiver, KVRegion, KVSender, LocalEnd
from twinpool.kv_transfer.manifest import check_digests, digests

SCRIPT = Path(__file__).with_name("transport_peer.py")
SOURCES = Path(__file__).parents[2] / "src"
DEADLINE_S = 30.0
UNTOUCHED = 0xA5

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def _load_peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transport_peer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer_module = _load_peer()
LAYOUT, NUM_BLOCKS = peer_module.LAYOUT, peer_module.NUM_BLOCKS
LAYERS = LAYOUT.num_layers
HALF = 7
"""The first layers of a block that go in a message of their own by ucx; those that are left are fewer."""


class RemotePeer:
    """A peer process. Calling a command raises PeerLost or AssertionError for the errors it answers with."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, transport: str, worker_id: str) -> RemotePeer:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, str(SCRIPT), transport, worker_id,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip

    async def call(self, name: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        async with asyncio.timeout(DEADLINE_S):
            answer = json.loads(await self.process.stdout.readline())
        if error := answer.get("error"):
            raise PeerLost(error) if error.startswith("PeerLost") else AssertionError(error)
        return answer["value"]

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.communicate()


class LocalPeer:
    """The same commands in this process, for loopback."""

    def __init__(self, transport: str, worker_id: str) -> None:
        self.peer = peer_module.Peer(transport, worker_id)

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
        self.end = LocalEnd("decode-0", incarnation, f"test{os.getpid()}")
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


@pytest.fixture(params=["shm", "tcp", "tcp sealed", "ucx", "loopback"])
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    require(request.param.partition(" ")[0])
    desk = Desk(request.param)
    desk.receiver = await transports.receiver(
        desk.name, desk.region, desk.end, desk.shared, seal=desk.is_sealed
    )
    yield desk
    await desk.close()


def held_by_this_process() -> tuple[int, list[str], list[str]]:
    """Open file descriptors, threads of transports, and shared pools."""
    gc.collect()  # what earlier tests left to the collector
    pools = [path.name for path in Path("/dev/shm").glob(f"twinpool.test{os.getpid()}.*")]
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))
    return len(os.listdir("/proc/self/fd")), threads, pools


def is_closed_by_peer(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


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


@pytest.mark.parametrize("name", ["shm", "tcp", "ucx"])
async def test_a_killed_receiver_is_noticed_in_bounded_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(name)
    monkeypatch.setattr(pushes, "STALL_S", 1.0)
    peer = await RemotePeer.start(name, "decode-0")
    region = KVRegion(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)
    end = LocalEnd("prefill-0", "b2")
    blocks = list(range(NUM_BLOCKS))
    async with asyncio.timeout(DEADLINE_S):
        address = bytes.fromhex(await peer.call("listen"))
        sender: KVSender = await transports.sender(TransportName(name), address, region, end, seal=False)
        await peer.call("expect", fence=1, writer=end.writer, blocks=blocks)
        sender.push(1, BlockRange(blocks, blocks, 0, HALF))
        await sender.finish(1)
        assert sender.lost is None
        await peer.kill()

        async def go_on() -> None:
            sender.push(1, BlockRange(blocks, blocks, HALF, LAYERS))
            await sender.finish(1)

        with pytest.raises(PeerLost):
            await go_on()
        assert sender.lost is not None
        await sender.stop(1)
        with pytest.raises(PeerLost):
            sender.push(2, BlockRange(blocks, blocks, 0, HALF))
        await sender.close()
    shm_pool.sweep(f"test{os.getpid()}")


@pytest.mark.parametrize("name", ["tcp", "ucx"])
async def test_a_receiver_that_takes_nothing_blocks_no_push_and_loses_the_link(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(name)
    monkeypatch.setattr(pushes, "STALL_S", 0.5)
    peer = await RemotePeer.start(name, "decode-0")
    region = KVRegion(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)
    end = LocalEnd("prefill-0", "b2")
    blocks = list(range(NUM_BLOCKS))
    async with asyncio.timeout(DEADLINE_S):
        address = bytes.fromhex(await peer.call("listen"))
        sender = await transports.sender(TransportName(name), address, region, end, seal=False)
        await peer.call("expect", fence=1, writer=end.writer, blocks=blocks)
        peer.process.send_signal(signal.SIGSTOP)
        for _ in range(10):  # more than any socket buffers
            sender.push(1, BlockRange(blocks, blocks, 0, LAYERS))
        with pytest.raises(PeerLost, match="taken no byte"):
            await sender.finish(1)
        with pytest.raises(PeerLost):
            sender.push(2, BlockRange(blocks, blocks, 0, LAYERS))
        with pytest.raises(PeerLost):
            await sender.finish(2)
        await sender.stop(1)
        await sender.close()
        await peer.kill()


@pytest.mark.parametrize("desk", ["tcp", "tcp sealed"], indirect=True)
async def test_strangers_on_the_tcp_port_are_turned_away_and_counted(desk: Desk) -> None:
    host, port, *_ = msgspec.msgpack.decode(desk.receiver.address()).values()
    for junk in (b"GET / HTTP/1.1\r\n" + b"x" * 64, b"\0" * 26):
        with socket.create_connection((host, port), timeout=DEADLINE_S) as stranger:
            stranger.sendall(junk)
            assert await asyncio.to_thread(is_closed_by_peer, stranger)
    assert desk.receiver.num_junk == 2
    await desk.transfer(1, await desk.sender(), [1], [2])


def pools_of(deployment: str, worker_id: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"twinpool.{deployment}.{worker_id}.*"))


@pytest.mark.parametrize("of_any_server", [False, True])
async def test_a_pool_whose_owner_was_killed_is_swept_and_a_living_one_is_not(of_any_server: bool) -> None:
    require("shm")
    deployment = f"test{os.getpid()}"
    living = shm_pool.SharedPool(1 << 16, LocalEnd("decode-1", "c3", deployment))
    dead = await RemotePeer.start("shm", "decode-0")
    await dead.call("listen")
    (pool,) = pools_of(deployment, "decode-0")
    await dead.kill()
    shm_pool.sweep("*" if of_any_server else deployment)
    assert not pool.exists()
    assert living.path.exists()
    living.close()
    assert not living.path.exists()


async def test_a_pool_closed_while_a_tensor_looks_into_it_is_lost_to_its_writers() -> None:
    require("shm")
    end = LocalEnd("decode-0", "a1", f"test{os.getpid()}")
    pool = shm_pool.SharedPool(LAYOUT.block_bytes, end)
    tensor = np.frombuffer(pool.memory, dtype=np.uint8)
    region = KVRegion(memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT, 1)
    receiver = shm.ShmReceiver(region, pool)
    sender = shm.ShmSender(receiver.address(), region)
    sender.push(1, BlockRange([0], [0], 0, LAYERS))
    pool.close()
    assert tensor.sum() == 0
    with pytest.raises(PeerLost, match="owner"):
        sender.push(1, BlockRange([0], [0], 0, LAYERS))
    await sender.close()
    with pytest.raises(PeerLost, match="gone"):
        shm.ShmSender(receiver.address(), region)


async def test_a_pool_that_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    require("shm")
    docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: docker)
    with pytest.raises(ConfigError, match=r"100 MB .* 67 MB free"):
        shm_pool.SharedPool(100_000_000, LocalEnd("decode-0", "a1", "test"))


@pytest.mark.parametrize("name", ["shm", "tcp", "ucx"])
async def test_an_address_of_another_transport_is_refused(name: str) -> None:
    require(name)
    region = KVRegion(memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT, 1)
    for junk in (b"", b"nonsense", msgspec.msgpack.encode({"ucx": b"nonsense", "digest": 7})):
        with pytest.raises(TransportUnavailable, match="address"):
            await transports.sender(
                TransportName(name), junk, region, LocalEnd("prefill-0", "b2"), seal=False
            )


async def test_a_pool_that_others_may_read_or_that_lies_elsewhere_is_not_written_to(tmp_path: Path) -> None:
    require("shm")
    region = KVRegion(memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT, 1)
    pool = shm_pool.SharedPool(LAYOUT.block_bytes, LocalEnd("decode-0", "a1", f"test{os.getpid()}"))
    address = shm.ShmReceiver(region, pool).address()
    assert pool.path.stat().st_mode & 0o777 == 0o600
    pool.path.chmod(0o640)
    with pytest.raises(TransportUnavailable, match=r"is -rw-r----- .* alone may read and write"):
        shm.ShmSender(address, region)
    pool.path.chmod(0o600)
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(LAYOUT.block_bytes))
    link = pool.path.with_name(f"twinpool.test{os.getpid()}.decode-0.link")
    link.symlink_to(victim)
    for name in (link.name, str(victim), f"../..{victim}", "twinpool.a.b"):
        with pytest.raises(TransportUnavailable, match=r"cannot be opened|not an address"):
            shm.ShmSender(msgspec.msgpack.encode({"name": name, "num_blocks": 1}), region)
    link.unlink()
    with pytest.raises(TransportUnavailable, match=f"has {LAYOUT.block_bytes} bytes, not"):
        shm.ShmSender(msgspec.msgpack.encode({"name": pool.path.name, "num_blocks": 2}), region)
    pool.close()


@pytest.mark.parametrize("name", ["tcp", "ucx"])
async def test_a_receiver_listens_on_its_own_host_only_and_survives_junk(name: str) -> None:
    require(name)
    before = listening()
    desk = Desk(name)
    desk.receiver = await transports.receiver(desk.name, desk.region, desk.end, seal=desk.is_sealed)
    ports = listening() - before
    assert {ip for ip, _ in ports} == {"127.0.0.1"}
    for address in ports:
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\xff" * 5000, os.urandom(5000)):
            with socket.create_connection(address, timeout=DEADLINE_S) as stranger, suppress(OSError):
                stranger.sendall(junk)
                stranger.shutdown(socket.SHUT_WR)
    await desk.transfer(1, await desk.sender(), [1], [2])
    await desk.close()


def listening() -> set[tuple[str, int]]:
    """The sockets on which this process listens."""
    sockets = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in sockets if c.status == psutil.CONN_LISTEN}  # type: ignore[misc]
