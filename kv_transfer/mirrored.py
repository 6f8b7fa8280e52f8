"""Transfers of a pool that is on a device by transports that work on host memory: through the pool's mirror there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twinpool.kv_transfer.connector import BlockRange, KVSender, PushReport
from twinpool.kv_transfer.probe import FIRST_PROBE_FENCE


class Mirror(Protocol):
    """A pool's mirror in host memory, with the same blocks at the same places. Any thread."""

    def fetch(self, block_ids: Sequence[int], first_layer: int, last_layer: int) -> None:
        """Copies final layers [first_layer, last_layer) of these blocks from the pool; returns when they are here."""
        ...

    def store(self, block_ids: Sequence[int]) -> None:
        """Copies these blocks into the pool; returns when every step that begins from then on finds them there."""
        ...


class MirroredSender:
    """Another sender over the mirror, whose pushes first bring the ranges there.

    A push waits for its copy, beside the model's kernels, not for the network. What a probe sends was made in the
    mirror, and is in no pool.
    """

    def __init__(self, inner: KVSender, mirror: Mirror) -> None:
        self.name = inner.name
        self.layer_group = inner.layer_group
        self._inner = inner
        self._mirror = mirror

    @property
    def lost(self) -> str | None:
        """The inner link's."""
        return self._inner.lost

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Fetches the ranges, then pushes them. Raises PeerLost."""
        if fence < FIRST_PROBE_FENCE:
            self._mirror.fetch(blocks.source_blocks, blocks.first_layer, blocks.last_layer)
        self._inner.push(fence, blocks)

    async def finish(self, fence: int) -> PushReport:
        """As the inner sender. Raises PeerLost."""
        return await self._inner.finish(fence)

    async def stop(self, fence: int) -> None:
        """As the inner sender."""
        await self._inner.stop(fence)

    async def close(self) -> None:
        """Closes the inner link."""
        await self._inner.close()
