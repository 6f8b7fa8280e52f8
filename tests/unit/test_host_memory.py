"""The memory of a KV pool is there before a step needs it, and keeps what is in it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from twinpool.engine.host_memory import FirstTouch, host_memory

MIB = 1 << 20
SIZE = 20 * MIB


def resident_bytes() -> int:
    """Of this process, private memory that has pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Anonymous line")


def can_populate() -> bool:
    area = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        area.madvise(23, 0, mmap.PAGESIZE)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_populate(), reason="makes pages ahead: needs Linux 5.14 or later")
def test_all_pages_are_made_some_at_a_time_and_what_is_in_them_stays() -> None:
    memory = host_memory(SIZE)
    memory[9 * MIB] = 7
    touch, before, seen = FirstTouch(memory.cast("B")[: SIZE - 1]), resident_bytes(), []
    while not touch.go_on():
        seen.append(resident_bytes() - before)
    assert len(seen) == 3, "8, 8 and 4 MiB"
    assert seen == sorted(seen)
    assert seen[0] < SIZE * 0.6
    assert seen[-1] >= SIZE - 3 * MIB, "one huge page was there"
    assert memory[9 * MIB] == 7
    assert bytes(memory[:64]) == bytes(64)
    assert touch.go_on(), "there is nothing left to do"


def test_memory_that_is_no_map_is_left_alone() -> None:
    assert FirstTouch(memoryview(bytearray(100))).go_on()
