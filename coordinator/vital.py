"""Work without which a server must not go on: better none than one that keeps no promise about time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from twinpool.errors import TwinpoolError

log = logging.getLogger(__name__)

OnFailure = Callable[[TwinpoolError], None]
"""Called on the event loop, once, with the line with which the server is to end."""


def start_vital(
    work: Coroutine[Any, Any, None], without_it: str, on_failure: OnFailure
) -> asyncio.Task[None]:
    """Runs `work`, which is to run until it is cancelled, as a task; the caller owns it.

    If it fails, the log says where, and `on_failure` gets a TwinpoolError that says what is missing `without_it`.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(partial(_tell_of_failure, without_it, on_failure))
    return task


def _tell_of_failure(without_it: str, on_failure: OnFailure, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.critical("a bug in Twinpool: %s", without_it, exc_info=exc)
        on_failure(
            TwinpoolError(
                f"the server ends by a bug in Twinpool ({type(exc).__name__}, logged above): {without_it}; "
                "start it again, and please report it"
            )
        )
