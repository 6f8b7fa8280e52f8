"""Main memory for a KV pool that no other process maps."""

from __future__ import annotations

import mmap
from contextlib import suppress


def host_memory(num_bytes: int) -> memoryview:
    """`num_bytes` zeroed and writable bytes, for as long as the view or an array over it lives.

    In huge pages where the system gives them when asked (the usual setting of Linux): a block then costs no page fault
    at its first use and one entry of the TLB, and UCX, which has the kernel copy from one process to another, moves a
    pool's blocks twice as fast. Private memory, because shared memory gets none. Pages take room when they are first
    used. No core dump has them: it would hold what clients say to the model, and gigabytes of it.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, num_bytes))
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel that does not know it: the pool serves as well
                area.madvise(getattr(mmap, advice))
    return memoryview(area)
