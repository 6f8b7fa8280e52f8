"""The log lines of server and workers, without what clients say to the model."""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType

from twinpool.errors import TwinpoolError

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def log_to_stderr(who: str) -> None:
    """Sends this process's log lines, each with the name `who`, to stderr. Call it once, before anything is logged."""
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setFormatter(PrivateFormatter(f"%(asctime)s {who} %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr])


class PrivateFormatter(logging.Formatter):
    """Writes where and as what an exception was raised, but its words only if they are ours or the system's: those of
    a library may quote the text that it stumbled over.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the exception in our words whoever wrote the record before."""
        record.exc_text = None
        return super().format(record)

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802  # logging's name
        """The exception and what caused it, the first cause first."""
        parts: list[str] = []
        error = ei[1]
        while error is not None:
            words = f": {error}" if isinstance(error, TwinpoolError | OSError) else ""
            parts.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__ + words)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\nwhich led to\n".join(reversed(parts))
