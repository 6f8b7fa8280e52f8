"""What both ends of `ucx` share: a UCX worker on the event loop, tags, buffers. Only this module knows ucxx.

The event loop makes UCX progress when UCX's file descriptor wakes it: an idle link costs nothing. While much is
under way the sending end looks once in a while instead: else the receiver would wake it with a system call after each
message.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_64_intdigest

from twinpool.errors import TransportUnavailable
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.plan import layer_group
from twinpool.layout import KVLayout

MAX_BLOCKS = 1 << 24
"""How many blocks a tag can tell apart."""
MOST_ADDRESS_BYTES = 1 << 16

_MIN_MESSAGE_BYTES = 128 << 10
_MAX_GROUPS = 1 << 8
_MOST_AT_ONCE_S = 0.001
"""The event loop has other things to do: UCX copies whole messages in what it calls progress."""
_PAUSE_S = 0.001
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
        raise TransportUnavailable(
            f"ucxx cannot be loaded ({exc}); pip install ucxx-cu12 libucx-cu12"
        ) from exc
    return core  # type: ignore[no-any-return]


def buffer(memory: memoryview) -> Any:
    """`memory` as ucxx takes it."""
    from ucxx._lib.arr import Array

    return Array(memory)


def tag_of(core: ModuleType, fence: int, block: int, group: int) -> Any:
    """64 bits: 32 of the fence, 24 of the block, 8 of the layer group.

    Of the fence it takes the lower 31 bits and the one that marks a probe's: two fences that share them
    are two billion reservations apart.
    """
    narrow = fence & 0x7FFF_FFFF | (fence >> 62 & 1) << 31
    return core.UCXXTag(narrow << 32 | block << 8 | group)


def layers_per_message(layout: KVLayout) -> int:
    """Layers that travel together: what makes a message worth its cost, and few enough parts for the tag."""
    return layer_group(layout, _MIN_MESSAGE_BYTES, _MAX_GROUPS)


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """UCX's own address of a worker, and its digest: UCX ends the process if it is given anything else."""

    ucx: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MOST_ADDRESS_BYTES)]
    digest: int


def pack_address(address: bytes) -> bytes:
    """What travels of a UCX worker's address."""
    return msgspec.msgpack.encode(_Address(address, xxh3_64_intdigest(address)))


def unpack_address(packed: bytes) -> bytes:
    """UCX's own address in it. Raises TransportUnavailable if it is none."""
    try:
        address = msgspec.msgpack.decode(packed, type=_Address)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise TransportUnavailable(f"transport ucx: not an address of a receiver: {exc}") from exc
    if address.digest != xxh3_64_intdigest(address.ucx):
        raise TransportUnavailable("transport ucx: the address of the receiver was changed on its way")
    return address.ucx


class UcxWorker:
    """A UCX worker on the running event loop. `after` is called whenever UCX may have completed something.

    While what it returns is true, it is called again after a millisecond, whatever UCX completes meanwhile; else as
    soon as UCX tells of something.
    """

    def __init__(self, end: LocalEnd, after: Callable[[], bool]) -> None:
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
        self._is_watched = False
        self._pause: asyncio.TimerHandle | None = None
        self._watch()

    def connect(self, address: Any) -> Any:
        """An endpoint to the worker at `address`, without the error handling that rules out shared memory."""
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
        until, is_over = time.perf_counter() + _MOST_AT_ONCE_S, False
        while not is_over and self.worker.progress_once():
            is_over = time.perf_counter() > until
        self._go_on(self._after(), is_over)

    def _go_on(self, is_patient: bool, is_over: bool) -> None:
        if self._is_closed:  # by what was called meanwhile
            return
        if is_over:
            self.poke()
        elif is_patient:
            self._rest()
        else:
            self._watch()
            # Without UCX's consent (arm) that nothing is pending, the next event may never show on the descriptor.
            if not self.worker.arm():
                self.poke()

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._fd, self._step)

    def _rest(self) -> None:
        """Looks again after a pause. The descriptor is not read meanwhile, so it would not cease to tell of events."""
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._fd)
        if self._pause is None:
            self._pause = self._loop.call_later(_PAUSE_S, self._rested)

    def _rested(self) -> None:
        self._pause = None
        self._step()

    def close(self) -> None:
        """Gives up what is under way and releases the worker."""
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        if self._pause is not None:
            self._pause.cancel()
        self.worker.cancel_inflight_requests()
        self.worker.progress()
