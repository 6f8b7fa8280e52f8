"""The process that predicts: `python -m twinpool.planner.autotune.child`, one question on stdin, its answer on stdout.

It runs only where nobody else wants the processor, and ends by itself when its time is up, also if the server is gone.
What it needs is imported after it has given way, for that takes seconds, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

NICENESS = 19


def give_way() -> None:
    """Everybody else's work goes first from here on."""
    os.nice(NICENESS)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """One question, one answer."""
    import msgspec
    import setproctitle

    from twinpool.planner.autotune.answering import answer
    from twinpool.planner.autotune.questions import LiveQuestion

    setproctitle.setproctitle("twinpool autotune")
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LiveQuestion)
    signal.setitimer(signal.ITIMER_REAL, question.seconds)  # whose signal ends the process
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer(question)))


if __name__ == "__main__":
    give_way()
    main()
