"""`ucx`, the receiving end, and how both ends work.

UCX, through ucxx, chooses the way (RDMA, CUDA IPC, shared memory, TCP) and moves the bytes into place.
The receiver posts a tag receive for every part (a block's layers of one layer group) of a reservation,
straight into its block; the sender sends each part under the same tag. A tag is fence, block and layer
group, so a message of an old fence finds no receive; it is taken off UCX's queue and thrown away. Every
message is sent by rendezvous: a send is complete only when its bytes are at the receiver.

A posted receive cannot be withdrawn through ucxx. It is *used up* instead: the receiver sends itself an
empty message under its tag, which matches it before anything else can and writes nothing. One that the
writer's message has matched already runs to its end, so blocks under it need the writer's acknowledgement
too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from twinpool.errors import InvariantViolation, TransferError, TransportUnavailable
from twinpool.kv_transfer.connector import KVRegion, LocalEnd
from twinpool.kv_transfer.intake import check_expected
from twinpool.kv_transfer.ucx_worker import (
    MAX_BLOCKS,
    UcxWorker,
    buffer,
    layers_per_message,
    pack_address,
    tag_of,
)

_CANCEL_S = 2.0


class UcxReceiver:
    """Tag receives into the pool of this worker."""

    name = "ucx"
    num_junk = 0
    """UCX turns strangers away by itself."""

    def __init__(self, region: KVRegion, end: LocalEnd) -> None:
        """Raises TransportUnavailable if UCX cannot be used here, or the pool has over 16 million blocks."""
        if region.num_blocks > MAX_BLOCKS:
            raise TransportUnavailable(
                f"transport ucx: {region.num_blocks} blocks; it can tell {MAX_BLOCKS} apart"
            )
        self._region = region
        self._ucx = UcxWorker(end, self._reap)
        self._core = self._ucx.core
        self._own_address = self._ucx.worker.address
        self._to_self = self._ucx.connect(self._own_address)
        self._posted: dict[int, _Posted] = {}
        self._cancelling: list[_Posted] = []
        self._draining: list[Any] = []
        self._scratch = memoryview(bytearray(layers_per_message(region.layout) * region.layout.layer_bytes))
        self.num_dropped = 0

    def address(self) -> bytes:
        """The UCX worker's address."""
        return pack_address(bytes(self._own_address))

    def expect(self, fence: int, writer: str, block_ids: Sequence[int]) -> None:  # noqa: ARG002  the tag says it all
        """Posts a receive for every part. Raises InvariantViolation: a fence repeated, a block out of range."""
        check_expected(fence, block_ids, self._region.num_blocks, self._posted)
        layout, step = self._region.layout, layers_per_message(self._region.layout)
        posted = _Posted()
        for group, first in enumerate(range(0, layout.num_layers, step)):
            for block in block_ids:
                start, length = layout.layer_range(block, first, min(first + step, layout.num_layers))
                tag = tag_of(self._core, fence, block, group)
                memory = buffer(self._region.memory[start : start + length])
                posted.requests.append((self._ucx.worker.tag_recv(memory, tag), tag))
        self._posted[fence] = posted
        self._ucx.poke()

    async def arrived(self, fence: int) -> None:
        """Returns when every receive is complete. Raises TransferError if the fence is not expected."""
        if (posted := self._posted.get(fence)) is None:
            raise TransferError(f"fence {fence} is not expected here")
        self._reap()
        await posted.done.wait()
        if posted.is_cancelled:
            raise TransferError(f"fence {fence} was cancelled")

    async def cancel(self, fence: int) -> None:
        """Uses up the receives that are still open. One that a dead writer left half done is abandoned."""
        if (posted := self._posted.pop(fence, None)) is None:
            return
        posted.is_cancelled = True
        self._cancelling.append(posted)
        for request, tag in posted.requests:
            if not request.completed:
                self._to_self.tag_send(buffer(self._scratch[:0]), tag)
        self._ucx.poke()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await posted.done.wait()

    def forget(self, fence: int) -> None:
        """Drops the bookkeeping of a fence that has arrived. Raises InvariantViolation if it has not."""
        posted = self._posted.pop(fence, None)
        if posted is not None and not posted.is_complete():
            self._posted[fence] = posted
            raise InvariantViolation(f"fence {fence} is forgotten with receives open; cancel it")

    async def close(self) -> None:
        """Cancels everything and releases UCX."""
        for fence in list(self._posted):
            await self.cancel(fence)
        self._ucx.close()

    def _reap(self) -> bool:
        self._drain()
        for posted in self._posted.values():
            posted.is_complete()
        self._cancelling = [posted for posted in self._cancelling if not posted.is_complete()]
        return False

    def _drain(self) -> None:
        """Throws away what has come under tags that nobody expects: every such fence is an old one.

        They all go to one scratch buffer, at once if need be: nobody reads it.
        """
        core, worker = self._core, self._ucx.worker
        while (probe := worker.tag_probe(core.UCXXTag(0), core.UCXXTagMask(0), True)).matched:
            self.num_dropped += probe.length > 0
            if probe.length > len(self._scratch):
                self._scratch = memoryview(bytearray(probe.length))
            self._draining.append(worker.tag_recv_with_handle(buffer(self._scratch[: probe.length]), probe))
        self._draining = [request for request in self._draining if not request.completed]


class _Posted:
    """The receives of one fence. `done` is set when all have ended."""

    def __init__(self) -> None:
        self.requests: deque[tuple[Any, Any]] = deque()
        self.done = asyncio.Event()
        self.is_cancelled = False

    def is_complete(self) -> bool:
        """Looks again at the receives that had not ended."""
        while self.requests and self.requests[0][0].completed:
            self.requests.popleft()
        if not self.requests:
            self.done.set()
        return not self.requests
