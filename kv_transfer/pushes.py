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
        self._finished_bytes = 0
        self._finished_s = 0.0

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
            self._finished_bytes += pushes.num_bytes
            self._finished_s += pushes.busy_s
            return PushReport(pushes.num_bytes, pushes.busy_s)

    def seconds_for(self, num_bytes: int) -> float:
        """What `num_bytes` take at the rate of all pushes that were finished; 0 before the first."""
        with self._lock:
            return num_bytes * self._finished_s / self._finished_bytes if self._finished_bytes else 0.0

    def __len__(self) -> int:
        """Fences with pushes that are neither finished nor stopped."""
        return len(self._pushes)


async def until_delivered(
    delivered: asyncio.Future[None], moved: Callable[[], int], peer: str, one_move_s: float = 0.0
) -> None:
    """Waits for `delivered` as long as `moved()` keeps growing: a count of what has arrived, in pieces of which one may
    take `one_move_s` on this link.

    Raises:
        PeerLost: nothing moved for `STALL_S` beyond that, or what `delivered` raises.
    """
    patience_s = STALL_S + one_move_s
    before = moved()
    while True:
        done, _ = await asyncio.wait((delivered,), timeout=patience_s)
        if done:
            return delivered.result()
        if (now := moved()) == before:
            raise PeerLost(f"{peer} has taken no byte for {patience_s:.3g} s")
        before = now
