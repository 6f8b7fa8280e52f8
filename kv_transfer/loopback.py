"""`loopback`: both ends in one process, for tests and for embedding. Every rule of the contract holds here too."""

from __future__ import annotations

import threading
import uuid

from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd, PushReport
from twinpool.kv_transfer.intake import TwoSidedReceiver
from twinpool.kv_transfer.pushes import PushLog

_receivers: dict[bytes, LoopbackReceiver] = {}


class LoopbackReceiver(TwoSidedReceiver):
    """A pool that senders of the same process write into after the fence check."""

    name = "loopback"

    def __init__(self, region: KVRegion) -> None:
        super().__init__(region)
        self._address = uuid.uuid4().bytes
        _receivers[self._address] = self

    def address(self) -> bytes:
        """A name that only this process can resolve."""
        return self._address

    async def close(self) -> None:
        """Senders get PeerLost from now on."""
        _receivers.pop(self._address, None)
        self._intake.drop_all()

    def take(self, fence: int, writer: str, source: KVRegion, blocks: BlockRange) -> bool:
        """Copies the ranges in, or drops (and counts) them: False."""
        layout = self._region.layout
        with self._intake.lock:
            if not self._intake.admits(fence, writer, blocks.target_blocks):
                self._intake.num_dropped += 1
                return False
            for source_block, target_block in zip(blocks.source_blocks, blocks.target_blocks, strict=True):
                start, length = layout.layer_range(source_block, blocks.first_layer, blocks.last_layer)
                offset, _ = layout.layer_range(target_block, blocks.first_layer, blocks.last_layer)
                self._region.memory[offset : offset + length] = source.memory[start : start + length]
                self._intake.landed(fence, length)
        return True


class LoopbackSender:
    """Copies straight into a receiver of this process."""

    name = "loopback"
    layer_group = 1

    def __init__(self, address: bytes, region: KVRegion, end: LocalEnd) -> None:
        """Raises PeerLost if no receiver of this process has that address."""
        if address not in _receivers:
            raise PeerLost("no loopback receiver of this process has that address")
        self._address = address
        self._region = region
        self._writer = end.writer
        self._log = PushLog()
        self._writing = threading.Lock()
        self._closed = False

    @property
    def lost(self) -> str | None:
        """Set once either end is closed."""
        if self._closed:
            return "the link was closed"
        return None if self._address in _receivers else "the loopback receiver is closed"

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Copies at once."""
        receiver = self._receiver()
        with self._writing:
            if self._log.begin(fence, blocks.num_bytes(self._region.layout)):
                receiver.take(fence, self._writer, self._region, blocks)
                self._log.end(fence)

    async def finish(self, fence: int) -> PushReport:
        """Everything is there already. Raises PeerLost if the receiver has closed."""
        self._receiver()
        return self._log.finish(fence)

    async def stop(self, fence: int) -> None:
        """Drops later pushes; one that is under way on another thread ends first."""
        self._log.stop(fence)
        with self._writing:
            pass

    async def close(self) -> None:
        """Pushes raise PeerLost from now on."""
        self._closed = True

    def _receiver(self) -> LoopbackReceiver:
        if (reason := self.lost) is not None:
            raise PeerLost(reason)
        return _receivers[self._address]
