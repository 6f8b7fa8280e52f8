"""The server's log lines, without what clients say to the model."""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from twinpool.errors import TwinpoolError

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


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
