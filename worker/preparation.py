"""What a job's grammar takes is done ahead of its steps, on a thread that delays neither steps nor messages."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore

from twinpool.messages import Generate, Message, Prefill, Reserve
from twinpool.request import Job
from twinpool.worker.step_thread import Runner

log = logging.getLogger(__name__)

MOST_AHEAD = 256
"""Jobs that may wait for it. What those beyond need is found out in their first step."""


class Preparation:
    """Has `runner` prepare the jobs that come. A job whose preparation fails, or comes too late, is no worse off than
    without: its step finds out by itself."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._room = BoundedSemaphore(MOST_AHEAD)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")

    def heard(self, message: Message) -> None:
        """A message of the coordinator has come; the job in it, if it has a grammar, is prepared soon."""
        match message:
            case Prefill(job) | Reserve(job) | Generate(job) if job.sampling.grammar is not None:
                if self._room.acquire(blocking=False):
                    self._executor.submit(self._prepare, job)

    def _prepare(self, job: Job) -> None:
        try:
            self._runner.prepare(job)
        except Exception as exc:  # noqa: BLE001  # whatever a library makes of what a client has written
            log.info(
                "a grammar could not be prepared: %s", type(exc).__name__
            )  # its words may be the client's
        finally:
            self._room.release()

    def close(self) -> None:
        """Begins no more, and does not wait for what is being done."""
        self._executor.shutdown(wait=False, cancel_futures=True)
