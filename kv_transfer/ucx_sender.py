"""`ucx`, the sending end; `ucx.py` tells how it works."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from twinpool.errors import InvariantViolation, PeerLost
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd, PushReport
from twinpool.kv_transfer.pushes import PushLog, until_delivered
from twinpool.kv_transfer.ucx_worker import (
    MAX_BLOCKS,
    UcxWorker,
    buffer,
    layers_per_message,
    tag_of,
    unpack_address,
)

_MAX_UNDER_WAY = 128
_MANY_UNDER_WAY = 16
"""More than these take about a millisecond, so this end need not hear of each one that has ended."""


class UcxSender:
    """Tag sends out of the pool of this worker. The step thread queues, the event loop sends.

    At most `_MAX_UNDER_WAY` messages are with UCX at a time, so that a stop has little to wait for.
    """

    name = "ucx"

    def __init__(self, address: bytes, region: KVRegion, end: LocalEnd) -> None:
        """Raises TransportUnavailable if UCX cannot be used here or `address` is none, PeerLost if it leads nowhere."""
        receiver = unpack_address(address)
        self.layer_group = layers_per_message(region.layout)
        self._region = region
        self._loop = asyncio.get_running_loop()
        self._log = PushLog()
        self._queue: deque[tuple[int, BlockRange]] = deque()
        self._to_send: deque[_Pushed] = deque()
        self._under_way: deque[tuple[int, Any]] = deque()
        self._fences: dict[int, _Outgoing] = {}
        self._num_delivered = 0
        self._lost: str | None = None
        self._ucx = UcxWorker(end, self._pump)
        self._core = self._ucx.core
        try:
            self._endpoint = self._ucx.connect(self._core.UCXAddress.create_from_buffer(receiver))
        except (self._core.UCXError, ValueError) as exc:
            self._ucx.close()
            raise PeerLost(f"no UCX worker can be reached at that address: {exc}") from exc

    @property
    def lost(self) -> str | None:
        """Set when UCX reports an error, or nothing has moved for too long. An idle link notices neither."""
        return self._lost

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Queues the ranges, which must be whole layer groups, for the event loop to send."""
        if self._lost is not None:
            raise PeerLost(f"the KV link by ucx is lost: {self._lost}")
        if any(block >= MAX_BLOCKS for block in blocks.target_blocks):
            raise PeerLost(f"the receiver granted blocks beyond {MAX_BLOCKS}, which no pool has")
        layout = self._region.layout
        for layer in (blocks.first_layer, blocks.last_layer):
            if layer % self.layer_group and layer != layout.num_layers:
                raise InvariantViolation(f"layer {layer} is no border of layer groups of {self.layer_group}")
        if self._log.begin(fence, blocks.num_bytes(layout)):
            self._queue.append((fence, blocks))
            self._loop.call_soon_threadsafe(self._pump)

    async def finish(self, fence: int) -> PushReport:
        """Waits until the receiver has everything."""
        await self._delivered(fence)
        return self._log.finish(fence)

    async def stop(self, fence: int) -> None:
        """Sends nothing more of `fence` and waits for the messages that UCX cannot give back any more.

        A receiver that takes none of them loses the link instead.
        """
        self._log.stop(fence)
        self._take_over()
        if (outgoing := self._fences.get(fence)) is not None:
            outgoing.num_parts -= sum(pushed.num_left for pushed in self._to_send if pushed.fence == fence)
        self._to_send = deque(pushed for pushed in self._to_send if pushed.fence != fence)
        self._settle(fence)
        with suppress(PeerLost):
            await self._delivered(fence)

    async def close(self) -> None:
        """Gives up what is under way: whoever waits gets PeerLost."""
        self._lose("the link was closed")

    # ── event loop ──────────────────────────────────────────────────────────────────────────────────────────

    async def _delivered(self, fence: int) -> None:
        self._pump()
        if self._lost is not None:
            raise PeerLost(f"the KV link by ucx is lost: {self._lost}")
        if (outgoing := self._fences.get(fence)) is not None:
            try:
                # UCX tells only of whole messages, and may move all that it has at once.
                message_bytes = self.layer_group * self._region.layout.layer_bytes
                one_move_s = self._log.seconds_for(_MAX_UNDER_WAY * message_bytes)
                await until_delivered(
                    outgoing.delivered, lambda: self._num_delivered, "the receiver by ucx", one_move_s
                )
            except PeerLost as exc:
                self._lose(str(exc))
                raise

    def _pump(self) -> bool:
        """Sends what there is room for; True while it does not matter to hear of each message that ends."""
        if self._lost is not None:
            return False
        self._take_over()
        # Messages of one endpoint end in order, or nearly: looking further than the first that has not would cost more
        # than it could tell.
        while self._under_way and self._under_way[0][1].completed:
            fence, request = self._under_way.popleft()
            try:
                request.check_error()
            except self._core.UCXError as exc:
                self._lose(str(exc))
                return False
            self._num_delivered += 1
            self._fences[fence].num_parts -= 1
            self._settle(fence)
        posted = False
        while self._to_send and len(self._under_way) < _MAX_UNDER_WAY:
            pushed = self._to_send[0]
            memory, tag = next(pushed.parts)
            self._under_way.append((pushed.fence, self._endpoint.tag_send(buffer(memory), tag)))
            posted = True
            pushed.num_left -= 1
            if not pushed.num_left:
                self._to_send.popleft()
        if posted:
            self._ucx.poke()
        return len(self._under_way) > _MANY_UNDER_WAY

    def _take_over(self) -> None:
        """What the step thread has queued is to be sent, as one message per block and layer group."""
        while self._queue:
            fence, blocks = self._queue.popleft()
            if self._log.is_stopped(fence):
                continue
            groups = range(blocks.first_layer, blocks.last_layer, self.layer_group)
            num_parts = len(groups) * len(blocks.source_blocks)
            outgoing = self._fences.setdefault(fence, _Outgoing(self._loop.create_future()))
            outgoing.num_pushes += 1
            outgoing.num_parts += num_parts
            if num_parts:
                self._to_send.append(_Pushed(fence, self._parts(fence, blocks, groups), num_parts))
            self._settle(fence)

    def _parts(self, fence: int, blocks: BlockRange, groups: range) -> Iterator[tuple[memoryview, Any]]:
        """Bytes and tag of each message. Made as they are sent, so that the receiver has work while they are made."""
        layout = self._region.layout
        for first in groups:
            last = min(first + self.layer_group, layout.num_layers)
            for source, target in zip(blocks.source_blocks, blocks.target_blocks, strict=True):
                start, length = layout.layer_range(source, first, last)
                tag = tag_of(self._core, fence, target, first // self.layer_group)
                yield self._region.memory[start : start + length], tag

    def _settle(self, fence: int) -> None:
        """Ends the pushes of `fence` if none of its messages is left."""
        outgoing = self._fences.get(fence)
        if outgoing is not None and outgoing.num_parts == 0:
            for _ in range(outgoing.num_pushes):
                self._log.end(fence)
            del self._fences[fence]
            if not outgoing.delivered.done():
                outgoing.delivered.set_result(None)

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        self._queue.clear()
        self._to_send.clear()
        for outgoing in self._fences.values():
            if not outgoing.delivered.done():
                outgoing.delivered.set_exception(PeerLost(f"the KV link by ucx is lost: {reason}"))
                outgoing.delivered.exception()  # nobody may be waiting: mark it as seen
        self._fences.clear()
        self._ucx.close()


@dataclass(slots=True)
class _Pushed:
    """A push of which messages are left to send."""

    fence: int
    parts: Iterator[tuple[memoryview, Any]]
    num_left: int


class _Outgoing:
    """The messages of one fence that are not delivered yet."""

    def __init__(self, delivered: asyncio.Future[None]) -> None:
        self.delivered = delivered
        self.num_parts = 0
        self.num_pushes = 0
