"""What a sender remembers of the fences that it pushes under, and how it waits for delivery."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import PushReport

STALL_S = 10.0
"""A transfer of which nothing has moved for so long counts as lost."""

_MAX_STOPPED = 1 << 16


@dataclass(slots=True)
class _Pushes:
    num_bytes: int = 0
    under_way: int = 0
    busy_s: float = 0.0
    started: float = 0.0


class PushLog:
    """Bytes, busy seconds and the end of every fence. Step thread and event loop both use it.

    A stopped fence stays stopped: a step that was planned before the stop may still push under it. The newest
    65,536 stopped fences are remembered, far more than one step can know.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes: dict[int, _Pushes] = {}
        self._stopped: OrderedDict[int, None] = OrderedDict()

    def begin(self, fence: int, num_bytes: int) -> bool:
        """A push starts; False if the fence is stopped, and nothing may be pushed."""
        with self._lock:
            if fence in self._stopped:
                return False
            pushes = self._pushes.setdefault(fence, _Pushes())
            if pushes.under_way == 0:
                pushes.started = time.perf_counter()
            pushes.under_way += 1
            pushes.num_bytes += num_bytes
            return True

    def end(self, fence: int) -> None:
        """A push that began has left for good. Ignored for a fence that was finished or stopped meanwhile."""
        with self._lock:
            if (pushes := self._pushes.get(fence)) is not None:
                pushes.under_way -= 1
                if pushes.under_way == 0:
                    pushes.busy_s += time.perf_counter() - pushes.started

    def is_stopped(self, fence: int) -> bool:
        """Whether `stop` was called for this fence."""
        return fence in self._stopped

    def stop(self, fence: int) -> None:
        """Nothing more may be pushed under this fence."""
        with self._lock:
            self._pushes.pop(fence, None)
            self._stopped[fence] = None
            if len(self._stopped) > _MAX_STOPPED:
                self._stopped.popitem(last=False)

    def finish(self, fence: int) -> PushReport:
        """Forgets the fence and returns its sums; zeros if nothing was pushed under it."""
        with self._lock:
            pushes = self._pushes.pop(fence, _Pushes())
            if pushes.under_way:
                pushes.busy_s += time.perf_counter() - pushes.started
            return PushReport(pushes.num_bytes, pushes.busy_s)

    def __len__(self) -> int:
        """Fences with pushes that are neither finished nor stopped."""
        return len(self._pushes)


async def until_delivered(delivered: asyncio.Future[None], moved: Callable[[], int], peer: str) -> None:
    """Waits for `delivered` as long as `moved()`, a count that grows with every byte, keeps growing.

    Raises:
        PeerLost: nothing moved for `STALL_S`, or what `delivered` raises.
    """
    before = moved()
    while True:
        done, _ = await asyncio.wait((delivered,), timeout=STALL_S)
        if done:
            return delivered.result()
        if (now := moved()) == before:
            raise PeerLost(f"{peer} has taken no byte for {STALL_S:g} s")
        before = now
