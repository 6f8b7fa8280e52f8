"""What the program and its sender processes tell each other: length, then MessagePack, over their standard streams."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from twinpool.bench.serving.record import RequestRecord, Sender
from twinpool.bench.serving.settings import LoadSettings
from twinpool.bench.serving.workload import PlannedRequest

_LENGTH = struct.Struct("<Q")


class Plan(msgspec.Struct, frozen=True, tag="plan", kw_only=True):
    """A sender's part of the load. Its bounds are its own share."""

    settings: LoadSettings
    requests: tuple[PlannedRequest, ...]
    max_concurrency: int | None
    num_clients: int | None
    core: int | None


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The load begins at this time (monotonic clock, which all processes of a machine share)."""

    at: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Send nothing more, leave what runs, and report."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """All requests are made and can be sent."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The plan cannot be sent: a setting is wrong."""

    why: str


class Tick(msgspec.Struct, frozen=True, tag="tick", kw_only=True):
    """How far a sender is; the times are of what came since the tick before."""

    num_sent: int
    num_running: int
    num_waiting: int
    num_pieces: int
    """Of output, so far; how many tokens they have is not known yet."""
    endings: dict[str, int]
    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]


class Finished(msgspec.Struct, frozen=True, tag="finished", kw_only=True):
    """All that a sender has."""

    records: tuple[RequestRecord, ...]
    sender: Sender


ToSender = Plan | Begin | Stop
FromSender = Ready | Refused | Tick | Finished

_encode = msgspec.msgpack.Encoder().encode
_to_sender = msgspec.msgpack.Decoder(ToSender)
_from_sender = msgspec.msgpack.Decoder(FromSender)


def write(stream: BinaryIO, message: ToSender | FromSender) -> None:
    """Writes a message and waits until it is taken. Raises BrokenPipeError."""
    data = memoryview(_LENGTH.pack(len(body := _encode(message))) + body)
    while data:
        data = data[stream.write(data) :]
    stream.flush()


def read_by_sender(stream: BinaryIO) -> ToSender | None:
    """The next message, or None at the end of the stream."""
    body = _read(stream)
    return None if body is None else _to_sender.decode(body)


def read_from_sender(stream: BinaryIO) -> FromSender | None:
    """The next message, or None at the end of the stream."""
    body = _read(stream)
    return None if body is None else _from_sender.decode(body)


def _read(stream: BinaryIO) -> bytes | None:
    head = _exactly(stream, _LENGTH.size)
    return None if head is None else _exactly(stream, _LENGTH.unpack(head)[0])


def _exactly(stream: BinaryIO, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = stream.read(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
