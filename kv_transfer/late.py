"""`late`: the fault of a `FaultPlan` that holds every push back, as a slow link or a transport with its own queue does.

What makes it more than a delay is when the bytes are read: long after `push` returned. A block that changed hands in
between, at either end, spoils an answer, if nothing guards it. So, unlike the other faults, which `FaultySender` throws
dice for on the thread that pushes, it needs a queue and a thread of its own; `FaultySender.open` puts it in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from twinpool.errors import PeerLost
from twinpool.kv_transfer.connector import BlockRange, KVSender, PushReport

POLL_S = 0.001


class LateSender:
    """Another sender whose pushes go out `late_s` seconds after the one before, from a thread of its own.

    A push that failed shows in `finish`. `stop` takes back what has not begun.
    """

    def __init__(self, inner: KVSender, late_s: float) -> None:
        self.name = inner.name
        self.layer_group = inner.layer_group
        self._inner = inner
        self._late_s = late_s
        self._held: deque[tuple[int, BlockRange]] = deque()
        self._writing: int | None = None
        self._failed: dict[int, PeerLost] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="kv-late", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """The inner link's."""
        return self._inner.lost

    def push(self, fence: int, blocks: BlockRange) -> None:
        """Takes the ranges, to write them later. Raises PeerLost."""
        with self._changed:
            if self._closed or (reason := self._inner.lost) is not None:
                raise PeerLost("the link was closed" if self._closed else str(reason))
            self._held.append((fence, blocks))
            self._changed.notify_all()

    async def finish(self, fence: int) -> PushReport:
        """Waits until everything of `fence` went out. Raises PeerLost."""
        while self._holds(fence):  # noqa: ASYNC110  # the writing thread has no event loop to tell
            await asyncio.sleep(POLL_S)
        with self._changed:
            error, closed = self._failed.pop(fence, None), self._closed
        if error is not None or closed:
            raise error or PeerLost("the link was closed")
        return await self._inner.finish(fence)

    async def stop(self, fence: int) -> None:
        """Takes back what waits under `fence` and stops the rest."""
        with self._changed:
            self._held = deque(item for item in self._held if item[0] != fence)
        while self._holds(fence):  # noqa: ASYNC110  # the writing thread has no event loop to tell
            await asyncio.sleep(POLL_S)
        with self._changed:
            self._failed.pop(fence, None)
        await self._inner.stop(fence)

    async def close(self) -> None:
        """Writes nothing more, and closes the inner link."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify_all()
        await self._inner.close()
        await asyncio.to_thread(self._thread.join)

    def _holds(self, fence: int) -> bool:
        with self._changed:
            return self._writing == fence or any(held == fence for held, _ in self._held)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._closed)
                self._changed.wait_for(lambda: self._closed, self._late_s)
                if self._closed:
                    return
                if not self._held:  # stopped meanwhile
                    continue
                self._writing, blocks = self._held.popleft()
            self._push(self._writing, blocks)
            with self._changed:
                self._writing = None

    def _push(self, fence: int, blocks: BlockRange) -> None:
        try:
            self._inner.push(fence, blocks)
        except PeerLost as exc:
            with self._changed:
                self._failed[fence] = exc
