"""Main memory for a KV pool that no other process maps."""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress

log = logging.getLogger(__name__)

_TOUCHED_AT_ONCE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it


def host_memory(num_bytes: int) -> memoryview:
    """`num_bytes` zeroed and writable bytes, for as long as the view or an array over it lives.

    In huge pages where the system gives them when asked (the usual setting of Linux): a block then costs no page fault
    at its first use and one entry of the TLB, and UCX, which has the kernel copy from one process to another, moves a
    pool's blocks twice as fast. Private memory, because shared memory gets none. Pages take room when they are first
    used (see `FirstTouch`). No core dump has them: it would hold what clients say to the model, and gigabytes of it.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, num_bytes))
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel that does not know it: the pool serves as well
                area.madvise(getattr(mmap, advice))
    return memoryview(area)


class FirstTouch:
    """Makes the pages of a pool that were not used yet, some at a time, whatever is in the others: the system zeroes a
    page when it is first used (0.5 s per GB), and without this a prompt's step would wait for it."""

    def __init__(self, memory: memoryview) -> None:
        """`memory` is as `host_memory` has given it."""
        self._memory: memoryview | None = memory
        self._next = 0

    def go_on(self) -> bool:
        """Makes the next ones, which holds the process up for some milliseconds. True: there are no more, or the system
        makes none ahead (Linux before 5.14; not enough memory)."""
        area = None if self._memory is None else self._memory.obj
        if not isinstance(area, mmap.mmap) or self._next >= len(area):
            self._memory = None
            return True
        num_bytes = min(_TOUCHED_AT_ONCE_BYTES, len(area) - self._next)
        try:
            area.madvise(_MADV_POPULATE_WRITE, self._next, num_bytes)
        except OSError as exc:
            log.info(
                "the KV pool's pages cannot be made ahead (%s): the first prompt in each waits for it", exc
            )
            self._memory = None
            return True
        self._next += num_bytes
        return False
