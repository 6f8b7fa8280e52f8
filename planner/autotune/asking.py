"""Has predictions made by a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import msgspec

from twinpool.planner.autotune.questions import Answer, LiveQuestion

COMMAND = (sys.executable, "-m", "twinpool.planner.autotune.child")
_LAST_WORDS = 300
_GRACE_S = 2.0


async def ask(question: LiveQuestion) -> Answer:
    """The child's answer, within the question's `seconds` and a moment: then, or if this is cancelled, it is killed."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(question.seconds + _GRACE_S):
            out, err = await process.communicate(msgspec.msgpack.encode(question))
    except TimeoutError:
        return Answer(None, _too_slow(question))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == -signal.SIGALRM:
        return Answer(None, _too_slow(question))
    try:
        return msgspec.msgpack.decode(out, type=Answer)
    except msgspec.MsgspecError:
        words = err.decode(errors="replace").strip()[-_LAST_WORDS:] or "it said nothing"
        return Answer(None, f"the process that predicts ended with status {process.returncode}: {words}")


def _too_slow(question: LiveQuestion) -> str:
    return f"a prediction took more than {question.seconds:g} s: too little of the processors is left for it"
