"""What a transport must do. One sender per (this worker, decode worker) link, one receiver per decode worker.

A transport moves byte ranges of one KV pool to equal ranges of another, each under a *fence*: the number of
the reservation that allows it. It decides nothing; who may write where is the ledger's business.

Contract, the same for every transport and tested over each:

- `KVSender.push` is called on the step thread, in layer order, once the bytes are final; it must not block
  for the network. The source ranges stay unchanged and allocated until `finish` or `stop` has returned.
- `KVSender.finish` returns when the transport no longer reads the source and will deliver without more calls.
- `finish` and `stop` end in bounded time: a link on which nothing moves any more is lost.
- `PeerLost` ends the link: nothing is read from the source or delivered any more, each later call raises
  it, and `KVSender.lost` says why. A new sender to the same receiver is a new link.
- After `KVSender.stop` has returned, no byte of that fence is written into the receiver's pool. One exception: over a
  slow two-sided link (`tcp`), until the receiver cancels the fence, which it does before it uses the blocks again.
- `KVReceiver.expect` comes before the sender learns the fence; `arrived` returns when every byte is in place.
- A byte under a fence that is not expected (any more) is dropped and counted, never written. A one-sided
  transport (`shm`, partly `ucx`) cannot do that; therefore the receiver's ledger keeps the blocks of every
  revoked fence in quarantine until the writer has acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twinpool.config import TransportName
from twinpool.layout import KVLayout

TWO_SIDED = frozenset({TransportName.TCP, TransportName.LOOPBACK})
"""Transports whose receiver does every write itself: once it expects a fence no more, nothing is written under it,
whatever the writer does. Over the others a writer that lives can write late."""


@dataclass(frozen=True, slots=True)
class KVRegion:
    """A worker's whole KV pool as bytes: a writable view, and its layout."""

    memory: memoryview
    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """Who this worker is to a transport: its process, its server's name, and the host it is reached at."""

    worker_id: str
    incarnation: str
    deployment: str = "local"
    host: str = "127.0.0.1"

    @property
    def writer(self) -> str:
        """The name under which a receiver expects this worker's writes: ``worker_id/incarnation``."""
        return f"{self.worker_id}/{self.incarnation}"


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Layers [first_layer, last_layer) of the block pairs source → target."""

    source_blocks: Sequence[int]
    target_blocks: Sequence[int]
    first_layer: int
    last_layer: int

    def num_bytes(self, layout: KVLayout) -> int:
        """Bytes that these ranges move."""
        return len(self.source_blocks) * (self.last_layer - self.first_layer) * layout.layer_bytes


@dataclass(frozen=True, slots=True)
class PushReport:
    """What went out under a fence: bytes, and the seconds in which at least one push was under way."""

    num_bytes: int
    seconds: float


class KVSender(Protocol):
    """Pushes to one decode worker."""

    name: str
    layer_group: int
    """How many layers to hand over together: small messages cost more than they hide."""

    @property
    def lost(self) -> str | None:
        """Why the link has ended; None while it works, as far as this end knows. Event loop."""
        ...

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Hands ranges to the transport. Step thread. Raises PeerLost."""
        ...

    async def finish(self, fence: int) -> PushReport:
        """Waits until everything pushed under `fence` is handed over. Raises PeerLost."""
        ...

    async def stop(self, fence: int) -> None:
        """Abandons `fence`: when this returns, nothing is written under it any more. Never raises."""
        ...

    async def close(self) -> None:
        """Releases the link. Pushes under way fail with PeerLost."""
        ...


class KVReceiver(Protocol):
    """Takes pushes of any number of prefill workers into this worker's pool."""

    name: str

    @property
    def num_dropped(self) -> int:
        """Pushes that were dropped because their fence was not expected. It only grows."""
        ...

    @property
    def num_junk(self) -> int:
        """Connections that were closed because what came was not this transport's. It only grows."""
        ...

    def address(self) -> bytes:
        """What a sender needs to connect; travels in PeerWelcome."""
        ...

    def expect(self, fence: int, writer: str, block_ids: Sequence[int]) -> None:
        """Lets `writer` (worker_id/incarnation) write these blocks, all layers, under `fence`."""
        ...

    async def arrived(self, fence: int) -> None:
        """Returns when every byte expected under `fence` is in place. Raises PeerLost, TransferError."""
        ...

    async def cancel(self, fence: int) -> None:
        """Stops expecting `fence`; when this returns, only a one-sided writer could still write under it."""
        ...

    def forget(self, fence: int) -> None:
        """The reservation ended well; drop the bookkeeping of `fence`."""
        ...

    async def close(self) -> None:
        """Releases sockets and shared memory."""
        ...
