"""One codec for both wires: MessagePack by msgspec."""

from __future__ import annotations

from typing import Any

import msgspec

from twinpool.errors import InvariantViolation, ProtocolError
from twinpool.messages.base import Message
from twinpool.messages.control import ControlMessage
from twinpool.messages.peer import PeerMessage

MAX_MESSAGE_BYTES = 64 << 20

AnyMessage = ControlMessage | PeerMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message as one MessagePack map.

    Raises:
        InvariantViolation: it carries a value that no message can, like an integer of more than 64 bits.
    """
    try:
        return _encoder.encode(message)
    except (OverflowError, TypeError, ValueError) as exc:
        raise InvariantViolation(f"a {type(message).__name__} that cannot be sent: {exc}") from exc


def decode(data: bytes | memoryview) -> Message:
    """The message in `data`.

    Raises:
        ProtocolError: `data` is too long, no MessagePack, or no message that this version knows.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a message that this version does not read: {exc}") from exc
    return message
