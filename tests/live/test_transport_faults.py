"""What goes wrong at one end of a link: peers that die or stand still, strangers, addresses that are none."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

import msgspec
import psutil
import pytest
from support.transport_desk import DEADLINE_S, DEPLOYMENT, HALF, LAYERS, Desk, RemotePeer, require
from support.transport_peer import LAYOUT, NUM_BLOCKS

from twinpool.config import TransportName
from twinpool.errors import PeerLost, TransportUnavailable
from twinpool.kv_transfer import pushes, shm_pool, transports
from twinpool.kv_transfer.connector import BlockRange, KVRegion, KVSender, LocalEnd

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def is_closed_by_peer(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


async def linked_to(peer: RemotePeer, name: str, blocks: list[int]) -> KVSender:
    """A sender to the peer, which expects these blocks under fence 1."""
    region = KVRegion(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), LAYOUT, NUM_BLOCKS)
    end = LocalEnd("prefill-0", "b2")
    address = bytes.fromhex(await peer.call("listen"))
    sender = await transports.sender(TransportName(name), address, region, end, seal=False)
    await peer.call("expect", fence=1, writer=end.writer, blocks=blocks)
    return sender


@pytest.mark.parametrize("name", ["shm", "tcp", "ucx"])
async def test_a_killed_receiver_is_noticed_in_bounded_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(name)
    monkeypatch.setattr(pushes, "STALL_S", 1.0)
    peer, blocks = await RemotePeer.start(name, "decode-0"), list(range(NUM_BLOCKS))
    async with asyncio.timeout(DEADLINE_S):
        sender = await linked_to(peer, name, blocks)
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
    shm_pool.sweep(DEPLOYMENT)


@pytest.mark.parametrize("name", ["tcp", "ucx"])
async def test_a_receiver_that_takes_nothing_blocks_no_push_and_loses_the_link(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(name)
    monkeypatch.setattr(pushes, "STALL_S", 0.5)
    peer, blocks = await RemotePeer.start(name, "decode-0"), list(range(NUM_BLOCKS))
    async with asyncio.timeout(DEADLINE_S):
        sender = await linked_to(peer, name, blocks)
        peer.freeze()
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


@pytest.mark.parametrize("name", ["shm", "tcp", "ucx"])
async def test_an_address_of_another_transport_is_refused(name: str) -> None:
    require(name)
    region = KVRegion(memoryview(bytearray(LAYOUT.block_bytes)), LAYOUT, 1)
    for junk in (b"", b"nonsense", msgspec.msgpack.encode({"ucx": b"nonsense", "digest": 7})):
        with pytest.raises(TransportUnavailable, match="address"):
            await transports.sender(
                TransportName(name), junk, region, LocalEnd("prefill-0", "b2"), seal=False
            )


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
