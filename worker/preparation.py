"""What a job's grammar takes is done before the core hears of the job, on a thread that delays no step and no message.

Compiling is a millisecond or two for a usual grammar and a quarter of a second for a huge one. In a job's first step
that would be a gap in every stream of the worker, and many such jobs at once would make one of many seconds. What the
first grammar of all takes holds up every other thread, whichever does it: so it is done while the worker is idle. So is
what the first use of the pool's memory takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from twinpool.errors import ModelError
from twinpool.messages import Cancel, Generate, Message, Prefill, PushTo, Reserve
from twinpool.request import Job, RequestKey
from twinpool.worker.step_thread import Grammars

log = logging.getLogger(__name__)

MOST_AHEAD = 256
"""Jobs that may be held back for it. What those beyond need is found out in their first step."""
IDLE_S = 2.0
"""After so long without work a worker gets ahead: whoever sends a request as soon as the server is ready does not wait
for that."""
NICENESS = 10
"""Of the thread, where threads have one: where it shares a core with the model's steps, they get most of it."""


class Preparation:
    """Passes the coordinator's messages on to `pass_on`; a job with a grammar once `grammars` has prepared it, and what
    the coordinator says of that job meanwhile after it. A Cancel goes at once, in place of all that was held back.

    A job whose preparation fails is passed on all the same: its step finds out by itself. Of grammars only one that
    `has_streams` gets ahead: what that takes is kept, and elsewhere there is nothing to hold up. `touch` makes some
    pages of the pool's memory, and says whether those were the last. Lives on the event loop.
    """

    def __init__(
        self,
        grammars: Grammars,
        pass_on: Callable[[Message], None],
        touch: Callable[[], bool],
        *,
        has_streams: bool,
    ) -> None:
        self._grammars = grammars
        self._pass_on = pass_on
        self._loop = asyncio.get_running_loop()
        self._held: dict[RequestKey, list[Message]] = {}
        self._executor = ThreadPoolExecutor(1, "prepare", initializer=_step_back)
        self._is_closed = False
        self._idle_since: float | None = None
        self._ahead = deque([grammars.get_ahead, touch] if has_streams else [touch])
        """What is to be done piece by piece while the worker is idle."""
        self._is_getting_ahead = False

    def take(self, message: Message) -> None:
        """A message of the coordinator has come."""
        match message:
            case Prefill(job) | Reserve(job) | Generate(job) if job.sampling.grammar is not None:
                if job.key not in self._held and len(self._held) < MOST_AHEAD:
                    self._held[job.key] = [message]
                    self._executor.submit(self._prepare, job)
                    return
            case PushTo(key) if key in self._held:
                self._held[key].append(message)
                return
            case Cancel(key):
                self._held.pop(key, None)
                self.left(key)
        self._pass_on(message)

    def left(self, key: RequestKey) -> None:
        """The job has left the worker; what was prepared for it, if nobody has come for that, is of no use."""
        self._grammars.forget(key)

    def look(self, now: float, *, is_idle: bool) -> None:
        """Does a piece of what the first grammar or the first use of memory takes, if the worker has been idle for
        `IDLE_S` at `now` and none is being done. To be called several times in that span."""
        if not is_idle or self._held:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif not self._ahead or self._is_getting_ahead or self._is_closed:
            return
        elif now - self._idle_since >= IDLE_S:
            self._is_getting_ahead = True
            self._executor.submit(self._get_ahead)

    def _get_ahead(self) -> None:
        is_done = True
        try:
            is_done = self._ahead[0]()
        except ModelError:
            pass  # whoever sends a grammar is told
        except Exception as exc:  # noqa: BLE001  # the library may not be there, or fail in ways of its own
            log.warning("grammars could not be made ready: %s", type(exc).__name__)
        if is_done:
            self._ahead.popleft()
        self._is_getting_ahead = False

    def _prepare(self, job: Job) -> None:
        try:
            if job.key in self._held:  # else it was cancelled meanwhile
                self._grammars.prepare(job)
        except Exception as exc:  # noqa: BLE001  # whatever a library makes of what a client has written
            # Its words may be the client's.
            log.info("a grammar could not be prepared: %s", type(exc).__name__)
        if not self._is_closed:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._prepared, job.key)

    def _prepared(self, key: RequestKey) -> None:
        if self._is_closed:
            return
        if (held := self._held.pop(key, None)) is None:  # cancelled meanwhile
            self.left(key)
            return
        for message in held:
            self._pass_on(message)

    def close(self) -> None:
        """Begins no more, passes nothing on, and does not wait for what is being done."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


def _step_back() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
