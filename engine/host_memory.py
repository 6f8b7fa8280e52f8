"""Main memory for a KV pool that no other process maps."""

from __future__ import annotations

import mmap
from contextlib import suppress


def host_memory(num_bytes: int) -> memoryview:
    """`num_bytes` zeroed and writable bytes, for as long as the view or an array over it lives.

    In huge pages where the system gives them when asked (the usual setting of Linux): a block then costs no page fault
    at its first use and one entry of the TLB, and UCX, which has the kernel copy from one process to another, moves a
    pool's blocks twice as fast. Private memory, because shared memory gets none. Pages take room when they are first
    used.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, num_bytes))
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(
            OSError
        ):  # a kernel that was built without them: small pages serve as well, only slower
            area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)
