"""What the bench counts as a process's own memory."""

from __future__ import annotations

import os

import numpy as np

from twinpool.bench.costs import own_bytes
from twinpool.engine.host_memory import host_memory

_BYTES = 64 << 20


def test_own_memory_counts_and_a_kv_pool_does_not() -> None:
    pool = np.frombuffer(host_memory(_BYTES), np.uint8)
    before = own_bytes(os.getpid())
    pool[::4096] = 1
    with_pool = own_bytes(os.getpid())
    own = np.ones(_BYTES, np.uint8)
    with_own = own_bytes(os.getpid())
    assert with_pool - before < _BYTES // 4
    assert with_own - with_pool > _BYTES * 3 // 4
    assert own[-1] == pool[0] == 1
