"""What a worker process and whoever started it agree on: exit statuses, and the pipe that ties their lives."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is wrong; starting the same worker again cannot help."""
EXIT_START_ANEW = 3
"""The coordinator does not know this process any more; a new one in its place may join."""
EXIT_ORPHANED = 4
"""The process that started the worker is gone."""


def start_anew(role: str, worker_id: str) -> NoReturn:
    """Replaces this process by a new one with the same command line, but for the role, which may have changed, and the
    name, which is made of it unless it was given: threads, memory and locks are gone at once, whatever they hang in."""
    os.execv(sys.executable, [sys.executable, *arguments_anew(sys.orig_argv[1:], role, worker_id)])


def arguments_anew(arguments: Sequence[str], role: str, worker_id: str) -> list[str]:
    """The command line of a process that starts anew: what comes last counts.

    >>> arguments_anew(["-m", "twinpool", "worker", "--role=decode"], "prefill", "w")
    ['-m', 'twinpool', 'worker', '--role=decode', '--role', 'prefill', '--id', 'w']
    """
    added = ["--role", role, "--id", worker_id]
    is_again = [*arguments[-4:-3], *arguments[-2:]] == ["--role", "--id", worker_id]
    return [*(arguments[:-4] if is_again else arguments), *added]


def watch_lifeline(fd: int, on_cut: Callable[[], None], grace_s: float = 3.0) -> None:
    """Calls `on_cut` (on a thread of its own) once the other end of the pipe `fd` is closed.

    If the process still lives `grace_s` later, whatever it hangs in, it exits at once with `EXIT_ORPHANED`.
    """

    def wait() -> None:
        while os.read(fd, 1):
            pass
        on_cut()
        timer = threading.Timer(grace_s, os._exit, (EXIT_ORPHANED,))
        timer.daemon = True
        timer.start()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
