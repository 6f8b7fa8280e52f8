"""`shm`: the decode pool lies in POSIX shared memory; prefill workers of the same host write into it in place.

One copy, no serialisation, no message.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from twinpool.config import MOST_TOKENS
from twinpool.errors import InvariantViolation, PeerLost, TransferError, TransportUnavailable
from twinpool.kernels.byte_copy import copy_ranges
from twinpool.kv_transfer.connector import BlockRange, KVRegion, PushReport
from twinpool.kv_transfer.owned_file import DIRECTORY, PREFIX, owner_is_gone
from twinpool.kv_transfer.plan import layer_group
from twinpool.kv_transfer.pushes import PushLog
from twinpool.kv_transfer.shm_pool import SharedPool

_MIN_COPY_BYTES = 64 << 10
_COPY_BYTES = 1 << 20
_MAP_AT_ONCE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the pool's file, and its blocks. No path: a sender opens nothing outside `DIRECTORY`."""

    name: Annotated[str, msgspec.Meta(pattern=rf"\A{PREFIX}(\.[A-Za-z0-9_-]{{1,64}}){{3}}\Z", max_length=255)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class ShmReceiver:
    """Lets senders of this host map the pool. They write by themselves: this end only keeps the books."""

    name = "shm"
    num_dropped = 0
    """This end never sees a write, so it cannot drop one."""
    num_junk = 0

    def __init__(self, region: KVRegion, shared: SharedPool | None) -> None:
        """`region` must lie in `shared` from its first byte on.

        Raises:
            TransportUnavailable: there is no `shared`.
        """
        if shared is None:
            raise TransportUnavailable("transport shm: this worker's KV pool is not in shared memory")
        self._address = msgspec.msgpack.encode(_Address(shared.path.name, region.num_blocks))
        self._expected: set[int] = set()

    def address(self) -> bytes:
        """Name and size of the pool."""
        return self._address

    def expect(self, fence: int, writer: str, block_ids: Sequence[int]) -> None:  # noqa: ARG002
        """Notes the fence. Raises InvariantViolation if it is expected already."""
        if fence in self._expected:
            raise InvariantViolation(f"fence {fence} is expected twice")
        self._expected.add(fence)

    async def arrived(self, fence: int) -> None:
        """Returns at once: only what is written gets sealed. Raises TransferError for an unknown fence."""
        if fence not in self._expected:
            raise TransferError(f"fence {fence} is not expected here")

    async def cancel(self, fence: int) -> None:
        """Forgets the fence; the writer can still write."""
        self._expected.discard(fence)

    def forget(self, fence: int) -> None:
        """Forgets the fence."""
        self._expected.discard(fence)

    async def close(self) -> None:
        """Forgets all; the pool itself is its owner's to close."""
        self._expected.clear()


class ShmSender:
    """Writes into a mapped pool of another process, on the calling thread."""

    name = "shm"

    def __init__(self, address: bytes, region: KVRegion) -> None:
        """Maps the pool at `address`, whose layout the handshake has found equal to that of `region`.

        Raises:
            TransportUnavailable: the address is no shared pool of this size.
            PeerLost: its owner is gone.
        """
        self._layout = region.layout
        self.layer_group = layer_group(region.layout, _MIN_COPY_BYTES, region.layout.num_layers)
        try:
            where = msgspec.msgpack.decode(address, type=_Address)
            path = DIRECTORY / where.name
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            raise TransportUnavailable(f"transport shm: not an address of a shared pool: {exc}") from exc
        except FileNotFoundError as exc:
            raise PeerLost(f"the shared pool {path} is gone, or on another host") from exc
        except PermissionError as exc:
            raise TransportUnavailable(f"transport shm: {path} belongs to another user") from exc
        except OSError as exc:
            raise TransportUnavailable(f"transport shm: {path} cannot be opened: {exc}") from exc
        self._peer = where.name
        nbytes = where.num_blocks * self._layout.block_bytes
        if (objection := _objection(os.fstat(self._fd), nbytes)) is not None:
            os.close(self._fd)
            raise TransportUnavailable(f"transport shm: {path} {objection}")
        self._map = mmap.mmap(self._fd, nbytes)
        self._source = np.frombuffer(region.memory, np.uint8)
        self._target = np.frombuffer(self._map, np.uint8)
        nothing = np.empty(0, np.int64)
        copy_ranges(
            self._source, nothing, self._target, nothing, 0
        )  # compiled now, and not at the first push
        self._log = PushLog()
        self._writing = threading.Lock()
        self._closed = False
        self._num_blocks = where.num_blocks
        self._nonsense: str | None = None
        self._mapping: asyncio.Task[None] | None = None

    @property
    def lost(self) -> str | None:
        """Set once this end is closed, or the owner of the pool is gone or grants what it has not."""
        if self._closed:
            return f"the link to {self._peer} is closed"
        if self._nonsense is not None:
            return self._nonsense
        if owner_is_gone(self._fd, fcntl.LOCK_SH):
            return f"the owner of the shared pool {self._peer} is gone"
        return None

    def map_pages(self) -> None:
        """Maps the last pages of the pool now, for the probe, and all others while the link is in use, from the first
        on: a push into a page that is not mapped yet maps it, which costs it time. (0.2 s per GB, on the event loop.)

        Linux before 5.14 cannot map ahead.
        """
        self._map_some(max(0, len(self._map) - _MAP_AT_ONCE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE)
        self._mapping = asyncio.get_running_loop().create_task(self._map_all())

    async def _map_all(self) -> None:
        for start in range(0, len(self._map), _MAP_AT_ONCE_BYTES):
            if self._closed or not self._map_some(start):
                return
            await asyncio.sleep(0)

    def _map_some(self, start: int) -> bool:
        """False if the system does not map, or the pages are not there: then the link is lost."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, start, min(_MAP_AT_ONCE_BYTES, len(self._map) - start))
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                self._nonsense = f"the pages of {self._peer} cannot be mapped: {exc}"
            return False
        return True

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Copies at once, about a MiB at a time; between two of those a stop takes effect."""
        if any(block >= self._num_blocks for block in blocks.target_blocks):
            self._nonsense = f"{self._peer} has {self._num_blocks} blocks, and granted others"
        with self._writing:  # against a close on the event loop
            self._require_peer()
        if not self._log.begin(fence, blocks.num_bytes(self._layout)):
            return
        first, num_bytes = self._layout.layer_range(0, blocks.first_layer, blocks.last_layer)
        sources = first + self._layout.block_bytes * np.array(blocks.source_blocks, np.int64)
        targets = first + self._layout.block_bytes * np.array(blocks.target_blocks, np.int64)
        at_once = max(1, _COPY_BYTES // num_bytes)
        for i in range(0, len(sources), at_once):
            with self._writing:
                if self._closed:
                    raise PeerLost(f"the link to {self._peer} is closed")
                if self._log.is_stopped(fence):
                    return
                some = slice(i, i + at_once)
                copy_ranges(self._source, sources[some], self._target, targets[some], num_bytes)
        self._log.end(fence)

    async def finish(self, fence: int) -> PushReport:
        """Everything is written already. Raises PeerLost if the owner of the pool is gone."""
        self._require_peer()
        return self._log.finish(fence)

    async def stop(self, fence: int) -> None:
        """Waits for the copy under way, at most some MiB."""
        self._log.stop(fence)
        with self._writing:
            pass

    async def close(self) -> None:
        """Unmaps the pool."""
        if self._mapping is not None:
            self._mapping.cancel()
        with self._writing:
            if self._closed:
                return
            self._closed = True
            os.close(self._fd)
            del self._target
            self._map.close()

    def _require_peer(self) -> None:
        if (reason := self.lost) is not None:
            raise PeerLost(reason)


def _objection(pool: os.stat_result, nbytes: int) -> str | None:
    """What is wrong with a file that is to be a pool of this user's, and of nobody else's."""
    if not stat.S_ISREG(pool.st_mode) or pool.st_uid != os.geteuid() or pool.st_mode & 0o077:
        mode = stat.filemode(pool.st_mode)
        return (
            f"is {mode} of user {pool.st_uid}, not a file that user {os.geteuid()} alone may read and write"
        )
    return f"has {pool.st_size} bytes, not {nbytes}" if pool.st_size < nbytes else None
