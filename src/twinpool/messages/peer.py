"""Between a prefill and a decode worker."""

from __future__ import annotations

from typing import Annotated

import msgspec

from twinpool.bounds import (
    Address,
    BlockIds,
    ByteCount,
    Count,
    Digests,
    Fence,
    Fences,
    Label,
    Name,
    Size,
    Text,
    TransferSeconds,
)
from twinpool.config import Encryption, TransportName
from twinpool.layout import KVLayout
from twinpool.messages.base import PROTOCOL_VERSION, Message
from twinpool.request import RequestKey


class PeerHello(Message, frozen=True, tag=True):
    """First message of a prefill worker on a decode worker's peer socket.

    `life` names the lock by which processes of its host can tell whether it lives (`kv_transfer/life.py`); "" if none.
    """

    worker_id: Name
    incarnation: Name
    fingerprint: Label
    layout: KVLayout
    transport: Label
    transports: Annotated[tuple[Label, ...], msgspec.Meta(max_length=16)]
    host: Label
    encryption: Encryption
    protocol: Count = PROTOCOL_VERSION
    life: Label = ""


class PeerWelcome(Message, frozen=True, tag=True):
    """The decode worker accepts: use `transport`, with `address` (the transport's own business). `host` tells its
    machine from others."""

    worker_id: Name
    incarnation: Name
    transport: TransportName
    address: Address
    host: Label


class PeerDenied(Message, frozen=True, tag=True):
    """The decode worker refuses; `reason` names both sides' values."""

    reason: Text


class PeerUnknown(Message, frozen=True, tag=True):
    """The decode worker has not heard of this process from its coordinator, not yet perhaps: say hello again soon."""


class Manifest(msgspec.Struct, frozen=True):
    """What was sent, so that the receiver can tell whether it is all there and unchanged.

    `block_ids` are the receiver's blocks that were written, in order; `digests[i]` is the 64-bit xxh3 of block i's
    bytes as sent. `num_tokens` tokens of the sequence are covered, cached blocks included. `first_token` is the token
    that prefill sampled after them. `num_bytes` and `transfer_s` are the sender's figures.
    """

    key: RequestKey
    fence: Fence
    fingerprint: Label
    layout: KVLayout
    num_tokens: Count
    block_ids: BlockIds
    digests: Digests
    first_token: Count
    num_bytes: ByteCount
    transfer_s: TransferSeconds


class Renew(Message, frozen=True, tag=True):
    """These grants are still wanted: their KV is queued, computed or on its way. Decode's leases start anew.

    Sent from the moment the grant arrives until its Seal, several times per lease.
    """

    fences: Fences


class Seal(Message, frozen=True, tag=True):
    """All bytes are handed to the transport; here is what they must be."""

    manifest: Manifest


class SealAck(Message, frozen=True, tag=True):
    """Decode has verified (or, with an `error`, refused) the sealed KV; prefill may release its blocks. Sent again,
    without an error, for a seal that comes again: what became of the KV, decode has told the coordinator."""

    key: RequestKey
    fence: Fence
    error: Text = ""


class Revoke(Message, frozen=True, tag=True):
    """Stop writing under this fence, forever, and acknowledge when no byte can come any more."""

    key: RequestKey
    fence: Fence


class RevokeAck(Message, frozen=True, tag=True):
    """No byte will be written under this fence any more."""

    key: RequestKey
    fence: Fence


class ProbeSeal(Message, frozen=True, tag=True):
    """The probe's bytes are sent; the receiver answers ProbeAck once they are all there and equal."""

    fence: Fence
    digests: Digests


class ProbeAck(Message, frozen=True, tag=True):
    """The probe arrived (or not: `error`)."""

    fence: Fence
    error: Text = ""


class ProbeRequest(Message, frozen=True, tag=True):
    """A prefill worker asks for blocks to write a probe into."""

    num_blocks: Size


class ProbeGrant(Message, frozen=True, tag=True):
    """Blocks for a probe. They return to the pool when the probe ends."""

    fence: Fence
    block_ids: BlockIds


PeerMessage = (
    PeerHello | PeerWelcome | PeerDenied | PeerUnknown | Renew | Seal | SealAck | Revoke | RevokeAck
    | ProbeRequest | ProbeGrant | ProbeSeal | ProbeAck
)  # fmt: skip
