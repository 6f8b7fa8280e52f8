"""The memory that `shm` works in: a KV pool as one file in /dev/shm, which other processes of this user can map.

It is named after the server, the worker and its incarnation; an exclusive lock on it, which the kernel drops when the
owner dies, tells the living from the dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from contextlib import suppress

from twinpool.errors import ConfigError, TransportUnavailable
from twinpool.kv_transfer import owned_file
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.owned_file import DIRECTORY, PREFIX, owner_is_gone

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPARE_BYTES = 4 << 20


def why_unavailable() -> str | None:
    """None if this machine has POSIX shared memory as files, else what is missing."""
    if not os.access(DIRECTORY, os.W_OK):
        return f"{DIRECTORY} is missing or not writable (it needs Linux); use --transport tcp"
    return None


class SharedPool:
    """Memory of `nbytes` bytes that other processes of this user can map. `memory` is zeroed and writable."""

    def __init__(self, nbytes: int, end: LocalEnd) -> None:
        """Allocates the pages for good (0.3 s per GB): a pool that does not fit fails here, not in mid-transfer.

        Raises:
            TransportUnavailable: no shared memory on this machine.
            ConfigError: it is too small or not this user's to use, or a name holds characters that no file name
                should; the message says what to do.
        """
        if (reason := why_unavailable()) is not None:
            raise TransportUnavailable(f"transport shm: {reason}")
        for part in (end.deployment, end.worker_id, end.incarnation):
            if not _NAME.fullmatch(part):
                raise ConfigError(f"{part!r} names a shared pool; allowed: letters, digits, - and _")
        self.path = DIRECTORY / f"{PREFIX}.{end.deployment}.{end.worker_id}.{end.incarnation}"
        _require_space(nbytes)
        self._fd = owned_file.create(self.path.name, f"the KV pool of {nbytes / 1e6:.0f} MB", nbytes)
        try:
            self._map = mmap.mmap(self._fd, nbytes)
        except OSError as exc:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            raise ConfigError(
                f"the KV pool of {nbytes / 1e6:.0f} MB cannot be mapped: {exc.strerror}; lower --num-blocks or "
                "--kv-memory-fraction, or let this process have more memory (ulimit -v)"
            ) from exc
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Removes the file. The memory stays valid for whoever maps it still. Calling it twice is fine."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # the mapping, which may live on, would keep it
            os.close(self._fd)
            self._fd = -1
            with suppress(BufferError):  # a tensor still looks into it; the memory goes when that does
                self.memory.release()
                self._map.close()


def sweep(deployment: str) -> list[str]:
    """Removes the pools of this server (``*``: of any) whose owner is dead: killed, so it could not. Returns their
    names.
    """
    removed: list[str] = []
    for path in sorted(DIRECTORY.glob(f"{PREFIX}.{deployment}.*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile, another user's, or no pool but a link
        try:
            if owner_is_gone(fd, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        finally:
            os.close(fd)
    return removed


def _require_space(nbytes: int) -> None:
    disk = os.statvfs(DIRECTORY)
    free = disk.f_bavail * disk.f_frsize
    if nbytes + _SPARE_BYTES > free:
        raise ConfigError(
            f"the KV pool needs {nbytes / 1e6:.0f} MB and {DIRECTORY} has {free / 1e6:.0f} MB free; "
            "lower --num-blocks or --kv-memory-fraction, enlarge it (docker run --shm-size=…), "
            "or use --transport tcp"
        )
