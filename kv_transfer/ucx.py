"""`ucx`: UCX through ucxx chooses the way (RDMA, CUDA IPC, shared memory, TCP) and moves bytes into place.

The receiver posts a tag receive for every part (a block's layers of one layer group) of a reservation,
straight into its block; the sender sends each part under the same tag. A tag is fence, block and layer
group, so a message of an old fence finds no receive; it is taken off UCX's queue and thrown away. Every
message is sent by rendezvous: a send is complete only when its bytes are at the receiver.

A posted receive cannot be withdrawn through ucxx. It is *used up* instead: the receiver sends itself an
empty message under its tag, which matches it before anything else can and writes nothing. One that the
writer's message has matched already runs to its end, so blocks under it need the writer's acknowledgement
too (`one_sided`).

Workers make progress on the event loop, woken by UCX's file descriptor: an idle link costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from twinpool.errors import InvariantViolation, PeerLost, TransferError, TransportUnavailable
from twinpool.kv_transfer.connector import BlockRange, KVRegion, LocalEnd, PushReport
from twinpool.kv_transfer.intake import check_expected
from twinpool.kv_transfer.plan import layer_group
from twinpool.kv_transfer.pushes import PushLog, until_delivered
from twinpool.layout import KVLayout

log = logging.getLogger(__name__)

_MIN_MESSAGE_BYTES = 128 << 10
_MAX_GROUPS = 1 << 8
_MAX_BLOCKS = 1 << 24
_MAX_UNDER_WAY = 128
_CANCEL_S = 2.0
_CLOSED = "the link was closed"
_LOOPBACK_HOSTS = ("127.", "localhost", "::1")

# Only where the user has not set the variable: UCX's own environment always wins.
_SETTINGS = {"RNDV_THRESH": "0", "TCP_TX_SEG_SIZE": "1m", "TCP_RX_SEG_SIZE": "1m"}


def why_unavailable() -> str | None:
    """None if ucxx can be used here, else what is missing."""
    try:
        _core()
    except TransportUnavailable as exc:
        return str(exc)
    return None


def _core() -> ModuleType:
    try:
        # UCX warns on stderr about variables of other UCX programs, and about one that ucxx itself sets.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        import ucxx._lib.libucxx as core
    except (ImportError, OSError) as exc:
        raise TransportUnavailable(f"ucxx cannot be loaded ({exc}); pip install 'twinpool[ucx]'") from exc
    return core  # type: ignore[no-any-return]


def _buffer(memory: memoryview | bytearray) -> Any:
    from ucxx._lib.arr import Array

    return Array(memory)


def _tag(core: ModuleType, fence: int, block: int, group: int) -> Any:
    """64 bits: 32 of the fence (the lower 31, and whether it is a probe's), 24 of the block, 8 of the
    layer group.
    """
    narrow = fence & 0x7FFF_FFFF | (fence >> 62 & 1) << 31
    return core.UCXXTag(narrow << 32 | block << 8 | group)


def _groups(layout: KVLayout) -> int:
    """Layers that travel together: what makes a message worth its cost, and few enough parts for the tag."""
    return layer_group(layout, _MIN_MESSAGE_BYTES, _MAX_GROUPS)


def _message_bytes(layout: KVLayout) -> int:
    return _groups(layout) * layout.layer_bytes


class _Progress:
    """A UCX worker on the running event loop. `after` is called whenever UCX may have completed something."""

    def __init__(self, end: LocalEnd, after: Callable[[], None]) -> None:
        self.core = _core()
        self._after = after
        self._loop = asyncio.get_running_loop()
        settings = dict(_SETTINGS)
        if end.host.startswith(_LOOPBACK_HOSTS):
            settings["NET_DEVICES"] = "lo"
        settings = {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}
        try:
            features = (self.core.Feature.TAG, self.core.Feature.WAKEUP)
            self._context = self.core.UCXContext(settings, feature_flags=features)
            self.worker = self.core.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
            self.worker.init_blocking_progress_mode()
            self._fd: int = self.worker.epoll_file_descriptor
        except self.core.UCXError as exc:
            raise TransportUnavailable(f"transport ucx: UCX does not start: {exc}") from exc
        self._is_scheduled = False
        self._is_closed = False
        self._loop.add_reader(self._fd, self._step)

    def connect(self, address: Any) -> Any:
        """An endpoint to the worker at `address`. Without UCX's error handling, which would rule out
        shared memory.
        """
        return self.core.UCXEndpoint.create_from_worker_address(
            self.worker, address, endpoint_error_handling=False
        )

    def poke(self) -> None:
        """Something was posted: make progress soon. Event loop only."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        self._step()

    def _step(self) -> None:
        if self._is_closed:
            return
        moved = False
        for _ in range(64):
            if not self.worker.progress():
                break
            moved = True
        self._after()
        # Sleeping is allowed only after UCX agrees that nothing is pending; else the next event may never
        # show.
        if moved or not self.worker.arm():
            self.poke()

    def close(self) -> None:
        """Gives up what is under way and releases the worker."""
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self.worker.cancel_inflight_requests()
        self.worker.progress()


class UcxReceiver:
    """Tag receives into the pool of this worker."""

    name = "ucx"
    one_sided = True

    def __init__(self, region: KVRegion, end: LocalEnd) -> None:
        """Raises TransportUnavailable if UCX cannot be used here, or the pool has over 16 million blocks."""
        if region.num_blocks > _MAX_BLOCKS:
            raise TransportUnavailable(
                f"transport ucx: {region.num_blocks} blocks; it can tell {_MAX_BLOCKS} apart"
            )
        self._region = region
        self._progress = _Progress(end, self._reap)
        self._core = self._progress.core
        self._own_address = self._progress.worker.address
        self._to_self = self._progress.connect(self._own_address)
        self._posted: dict[int, _Posted] = {}
        self._cancelling: list[_Posted] = []
        self._draining: list[Any] = []
        self._scratch = memoryview(bytearray(_message_bytes(region.layout)))
        self.num_dropped = 0

    def address(self) -> bytes:
        """The UCX worker's address."""
        return bytes(self._own_address)

    def expect(self, fence: int, writer: str, block_ids: Sequence[int]) -> None:  # noqa: ARG002  the tag says it all
        """Posts a receive for every part. Raises InvariantViolation for a repeated fence or a block out
        of range.
        """
        check_expected(fence, block_ids, self._region.num_blocks, self._posted)
        layout, step = self._region.layout, _groups(self._region.layout)
        posted = _Posted()
        for group, first in enumerate(range(0, layout.num_layers, step)):
            for block in block_ids:
                start, length = layout.layer_range(block, first, min(first + step, layout.num_layers))
                tag = _tag(self._core, fence, block, group)
                memory = _buffer(self._region.memory[start : start + length])
                posted.requests.append((self._progress.worker.tag_recv(memory, tag), tag))
        self._posted[fence] = posted
        self._progress.poke()

    async def arrived(self, fence: int) -> None:
        """Returns when every receive is complete. Raises TransferError if the fence is not expected (any
        more).
        """
        if (posted := self._posted.get(fence)) is None:
            raise TransferError(f"fence {fence} is not expected here")
        self._reap()
        await posted.done.wait()
        if posted.is_cancelled:
            raise TransferError(f"fence {fence} was cancelled")

    async def cancel(self, fence: int) -> None:
        """Uses up the receives that are still open. One that a dead writer has left half done is
        abandoned.
        """
        if (posted := self._posted.pop(fence, None)) is None:
            return
        posted.is_cancelled = True
        self._cancelling.append(posted)
        for request, tag in posted.requests:
            if not request.completed:
                self._to_self.tag_send(_buffer(self._scratch[:0]), tag)
        self._progress.poke()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                await posted.done.wait()

    def forget(self, fence: int) -> None:
        """Drops the bookkeeping of a fence whose receives are complete. Raises InvariantViolation if they
        are not.
        """
        posted = self._posted.pop(fence, None)
        if posted is not None and not posted.is_complete():
            self._posted[fence] = posted
            raise InvariantViolation(f"fence {fence} is forgotten with receives open; cancel it")

    async def close(self) -> None:
        """Cancels everything and releases UCX."""
        for fence in list(self._posted):
            await self.cancel(fence)
        self._progress.close()

    def _reap(self) -> None:
        self._drain()
        for posted in self._posted.values():
            posted.is_complete()
        self._cancelling = [posted for posted in self._cancelling if not posted.is_complete()]

    def _drain(self) -> None:
        """Throws away what has come under tags that nobody expects: every such fence is an old one.

        They all go to one scratch buffer, at once if need be: nobody reads it.
        """
        core, worker = self._core, self._progress.worker
        while (probe := worker.tag_probe(core.UCXXTag(0), core.UCXXTagMask(0), True)).matched:
            self.num_dropped += probe.length > 0
            if probe.length > len(self._scratch):
                self._scratch = memoryview(bytearray(probe.length))
            self._draining.append(worker.tag_recv_with_handle(_buffer(self._scratch[: probe.length]), probe))
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


class UcxSender:
    """Tag sends out of the pool of this worker."""

    name = "ucx"

    def __init__(self, address: bytes, region: KVRegion, end: LocalEnd) -> None:
        """Raises TransportUnavailable if UCX cannot be used here, PeerLost if `address` leads nowhere."""
        self.layer_group = _groups(region.layout)
        self._region = region
        self._loop = asyncio.get_running_loop()
        self._log = PushLog()
        self._queue: deque[tuple[int, BlockRange]] = deque()
        self._parts: deque[tuple[int, memoryview, Any]] = deque()
        self._under_way: list[tuple[int, Any]] = []
        self._fences: dict[int, _Outgoing] = {}
        self._num_delivered = 0
        self._lost: str | None = None
        self._progress = _Progress(end, self._pump)
        self._core = self._progress.core
        try:
            self._endpoint = self._progress.connect(self._core.UCXAddress.create_from_buffer(address))
        except (self._core.UCXError, ValueError) as exc:
            self._progress.close()
            raise PeerLost(f"no UCX worker can be reached at that address: {exc}") from exc

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Queues the ranges, which must be whole layer groups, for the event loop to send."""
        if self._lost is not None:
            raise PeerLost(f"the KV link by ucx is lost: {self._lost}")
        layout = self._region.layout
        for layer in (blocks.first_layer, blocks.last_layer):
            if layer % self.layer_group and layer != layout.num_layers:
                raise InvariantViolation(f"layer {layer} is no border of layer groups of {self.layer_group}")
        num_layers = blocks.last_layer - blocks.first_layer
        if self._log.begin(fence, len(blocks.source_blocks) * num_layers * layout.layer_bytes):
            self._queue.append((fence, blocks))
            self._loop.call_soon_threadsafe(self._pump)

    async def finish(self, fence: int) -> PushReport:
        """Waits until the receiver has everything."""
        await self._delivered(fence)
        return self._log.finish(fence)

    async def stop(self, fence: int) -> None:
        """Sends nothing more of `fence` and waits for the messages that UCX has already: they cannot be
        withdrawn.

        A receiver that takes none of them loses the link instead.
        """
        self._log.stop(fence)
        self._expand()
        kept = [part for part in self._parts if part[0] != fence]
        if (outgoing := self._fences.get(fence)) is not None:
            outgoing.num_parts -= len(self._parts) - len(kept)
        self._parts = deque(kept)
        self._settle(fence)
        try:
            await self._delivered(fence)
        except TransferError as exc:
            self._lose(str(exc))

    async def close(self) -> None:
        """Gives up what is under way: whoever waits gets PeerLost."""
        if self._lost != _CLOSED:
            self._lose(_CLOSED)
            self._lost = _CLOSED
            self._progress.close()

    # ── event loop ──────────────────────────────────────────────────────────────────────────────────────────

    async def _delivered(self, fence: int) -> None:
        self._pump()
        if self._lost is not None:
            raise PeerLost(f"the KV link by ucx is lost: {self._lost}")
        if (outgoing := self._fences.get(fence)) is not None:
            await until_delivered(outgoing.delivered, lambda: self._num_delivered, "the receiver by ucx")

    def _pump(self) -> None:
        if self._lost is not None:
            return
        self._expand()
        still: list[tuple[int, Any]] = []
        for fence, request in self._under_way:
            if not request.completed:
                still.append((fence, request))
                continue
            try:
                request.check_error()
            except self._core.UCXError as exc:
                self._lose(str(exc))
                return
            self._num_delivered += 1
            self._fences[fence].num_parts -= 1
            self._settle(fence)
        self._under_way = still
        posted = False
        while self._parts and len(self._under_way) < _MAX_UNDER_WAY:
            fence, memory, tag = self._parts.popleft()
            self._under_way.append((fence, self._endpoint.tag_send(_buffer(memory), tag)))
            posted = True
        if posted:
            self._progress.poke()

    def _expand(self) -> None:
        """Takes over what the step thread has queued, as one message per block and layer group."""
        layout, step = self._region.layout, self.layer_group
        while self._queue:
            fence, blocks = self._queue.popleft()
            if self._log.is_stopped(fence):
                continue
            outgoing = self._fences.setdefault(fence, _Outgoing(self._loop.create_future()))
            outgoing.num_pushes += 1
            for first in range(blocks.first_layer, blocks.last_layer, step):
                last = min(first + step, layout.num_layers)
                for source, target in zip(blocks.source_blocks, blocks.target_blocks, strict=True):
                    start, length = layout.layer_range(source, first, last)
                    tag = _tag(self._core, fence, target, first // step)
                    self._parts.append((fence, self._region.memory[start : start + length], tag))
                    outgoing.num_parts += 1
            self._settle(fence)

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
        self._parts.clear()
        for outgoing in self._fences.values():
            if not outgoing.delivered.done():
                outgoing.delivered.set_exception(PeerLost(f"the KV link by ucx is lost: {reason}"))
                outgoing.delivered.exception()  # nobody may be waiting: mark it as seen
        self._fences.clear()


class _Outgoing:
    """The messages of one fence that are not delivered yet."""

    def __init__(self, delivered: asyncio.Future[None]) -> None:
        self.delivered = delivered
        self.num_parts = 0
        self.num_pushes = 0
