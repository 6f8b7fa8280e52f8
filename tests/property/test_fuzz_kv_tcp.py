"""The KV port and what crosses it: strangers, junk, and sealed bytes that somebody on the way has touched."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.errors import PeerLost, TransportUnavailable
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd
from twinpool.kv_transfer.tcp import TcpReceiver
from twinpool.kv_transfer.tcp_hello import MAGIC, greet, welcome
from twinpool.kv_transfer.tcp_sender import TcpSender
from twinpool.kv_transfer.tcp_stream import (
    RECORD_BYTES,
    JunkError,
    SealedStream,
    Stream,
    StreamEndedError,
    give,
    take,
)
from twinpool.kv_transfer.tcp_wire import BLOCK, FLUSH, FRAME, PUSH, TcpAddress
from twinpool.layout import Dtype, KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=8, dtype=Dtype.FLOAT32)
NUM_BLOCKS = 4
SECRET = b"s" * 32
DEADLINE_S = 10.0
UNTOUCHED = 0xA5
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def pool(value: int) -> KVRegion:
    memory = memoryview(bytearray([value]) * (NUM_BLOCKS * LAYOUT.block_bytes))
    return KVRegion(memory, LAYOUT, NUM_BLOCKS)


# ── the port ──────────────────────────────────────────────────────────────────────────────────────────────────────


def frames() -> st.SearchStrategy[bytes]:
    """What a sender could put on a connection, and what none would."""
    head = st.builds(
        FRAME.pack,
        st.sampled_from((PUSH, FLUSH, 0, 255)),
        st.integers(0, 3) | st.integers(0, 2**64 - 1),
        st.integers(0, 3) | st.integers(0, 2**16 - 1),
        st.integers(0, 3) | st.integers(0, 2**16 - 1),
        st.integers(0, 5) | st.integers(0, 2**32 - 1),
    )
    blocks = st.lists(st.integers(0, 5) | st.integers(0, 2**32 - 1), max_size=4)
    tail = blocks.map(lambda ids: b"".join(map(BLOCK.pack, ids)))
    return st.lists(st.tuples(head, tail, st.binary(max_size=600)).map(b"".join), max_size=4).map(b"".join)


@QUICK
@given(
    junk=st.binary(max_size=300) | st.binary(max_size=60).map(lambda rest: MAGIC + rest),
    seal=st.booleans(),
)
def test_strangers_get_nothing_in_and_the_next_transfer_works(junk: bytes, seal: bool) -> None:
    async def scenario(receiver: TcpReceiver) -> None:
        where = msgspec.msgpack.decode(receiver.address(), type=TcpAddress)
        await asyncio.to_thread(throw, where, lambda connection: connection.sendall(junk))

    asyncio.run(survive(scenario, seal))


@QUICK
@given(junk=frames(), seal=st.booleans())
def test_frames_that_make_no_sense_of_one_who_knows_the_secret_write_nothing(junk: bytes, seal: bool) -> None:
    async def scenario(receiver: TcpReceiver) -> None:
        where = msgspec.msgpack.decode(receiver.address(), type=TcpAddress)

        def speak(connection: socket.socket) -> None:
            give(greet(connection, where.secret, "prefill-0/a1", where.sealed), connection, junk)

        await asyncio.to_thread(throw, where, speak)

    asyncio.run(survive(scenario, seal))


def throw(where: TcpAddress, speak: Callable[[socket.socket], None]) -> None:
    """Speaks to the port and hears it out until it closes."""
    with (
        socket.create_connection((where.host, where.port), timeout=DEADLINE_S) as connection,
        suppress(OSError),  # it may close in the midst of it
    ):
        speak(connection)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


async def survive(scenario: Callable[[TcpReceiver], object], seal: bool) -> None:
    """Lets `scenario` loose on a receiver; then its pool must be untouched, and a transfer must work."""
    source, target = pool(1), pool(UNTOUCHED)
    end = LocalEnd("prefill-0", "b2")
    receiver = TcpReceiver(target, LocalEnd("decode-0", "a1"), seal=seal)
    async with asyncio.timeout(DEADLINE_S):
        await scenario(receiver)  # type: ignore[misc]
        assert set(target.memory) == {UNTOUCHED}
        sender = await TcpSender.connect(receiver.address(), source, end, seal=seal)
        receiver.expect(1, end.writer, [2])
        sender.push(1, BlockRange([0], [2], 0, LAYOUT.num_layers))
        await sender.finish(1)
        await receiver.arrived(1)
        assert (
            bytes(target.memory[2 * LAYOUT.block_bytes : 3 * LAYOUT.block_bytes])
            == b"\1" * LAYOUT.block_bytes
        )
        await sender.close()
        await receiver.close()


# ── the hello ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(DEADLINE_S)
        there.settimeout(DEADLINE_S)
        yield here, there


def shake_hands(
    sender_secret: bytes, receiver_secret: bytes, sender_seals: bool, receiver_seals: bool
) -> tuple[object, object]:
    """Both sides of a hello: what each of them has of it, a stream or an error."""
    answers: list[object] = []

    def receive(connection: socket.socket) -> None:
        try:
            answers.append(welcome(connection, receiver_secret, receiver_seals)[0])
        except (JunkError, StreamEndedError, OSError) as exc:
            answers.append(exc)

    with line() as (here, there):
        receiver = threading.Thread(target=receive, args=(there,))
        receiver.start()
        try:
            sent: object = greet(here, sender_secret, "prefill-0/a1", sender_seals)
        except (JunkError, StreamEndedError, OSError) as exc:
            sent = exc
            here.close()
        receiver.join(DEADLINE_S)
    return sent, answers[0]


@pytest.mark.parametrize("sealed", [False, True])
def test_who_knows_the_secret_is_welcome(sealed: bool) -> None:
    stream, writer = shake_hands(SECRET, SECRET, sealed, sealed)
    assert isinstance(stream, SealedStream) is sealed
    assert writer == "prefill-0/a1"


@pytest.mark.parametrize(
    ("secret", "sender_seals", "receiver_seals"),
    [(b"t" * 32, True, True), (b"t" * 32, False, False), (SECRET, False, True), (SECRET, True, False)],
)
def test_who_does_not_know_it_or_would_have_it_unsealed_is_not(
    secret: bytes, sender_seals: bool, receiver_seals: bool
) -> None:
    sent, received = shake_hands(secret, SECRET, sender_seals, receiver_seals)
    assert isinstance(sent, JunkError)
    assert isinstance(received, (JunkError, StreamEndedError))


async def test_a_receiver_that_does_not_seal_is_refused_where_kv_is_to_be_encrypted() -> None:
    receiver = TcpReceiver(pool(0), LocalEnd("decode-0", "a1"), seal=False)
    try:
        end = LocalEnd("prefill-0", "b2")
        with pytest.raises(
            TransportUnavailable, match="takes KV unencrypted, which --kv-encryption forbids here"
        ):
            await TcpSender.connect(receiver.address(), pool(0), end, seal=True)
        where = msgspec.msgpack.decode(receiver.address(), type=TcpAddress)
        forged = msgspec.msgpack.encode(msgspec.structs.replace(where, secret=SECRET))
        with pytest.raises(PeerLost, match="does not know the receiver's secret"):
            await TcpSender.connect(forged, pool(0), end, seal=False)
    finally:
        await receiver.close()


# ── sealed bytes ──────────────────────────────────────────────────────────────────────────────────────────────────


def sealed(texts: list[bytes]) -> list[bytes]:
    """The records in which these texts cross the wire, one each."""
    records = []
    with line() as (here, there):
        stream = SealedStream(here, b"o" * 32, b"i" * 32)
        for text in texts:
            give(stream, here, text)
            records.append(there.recv(RECORD_BYTES * 2))
    return records


def opened(data: bytes, num_bytes: int) -> bytes:
    """What a receiver has of these bytes. Raises JunkError, StreamEndedError."""
    with line() as (here, there):
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        stream: Stream = SealedStream(there, b"i" * 32, b"o" * 32)
        return take(stream, num_bytes)


TEXTS = st.lists(st.binary(min_size=1, max_size=100), min_size=2, max_size=4)


@QUICK
@given(TEXTS)
def test_sealed_bytes_arrive_and_are_not_to_be_seen_on_the_way(texts: list[bytes]) -> None:
    records = sealed(texts)
    assert opened(b"".join(records), sum(map(len, texts))) == b"".join(texts)
    assert not any(len(text) > 8 and text in b"".join(records) for text in texts)


@QUICK
@given(TEXTS, st.data())
def test_sealed_bytes_that_were_touched_are_refused(texts: list[bytes], data: st.DataObject) -> None:
    records = sealed(texts)
    first = data.draw(st.integers(0, len(records) - 2))
    match data.draw(st.sampled_from(("flip", "swap", "leave out", "repeat", "cut"))):
        case "flip":
            whole = bytearray(b"".join(records))
            whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            touched = bytes(whole)
        case "swap":
            records[first], records[first + 1] = records[first + 1], records[first]
            touched = b"".join(records)
        case "leave out":
            del records[first]
            touched = b"".join(records)
        case "repeat":
            records.insert(first, records[first])
            touched = b"".join(records)
        case _:
            touched = b"".join(records)[: -data.draw(st.integers(1, 40))]
    with pytest.raises((JunkError, StreamEndedError)):
        opened(touched, sum(map(len, texts)))
