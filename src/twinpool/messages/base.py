"""What all messages are."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 4


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""
