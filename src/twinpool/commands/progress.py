"""How far a long computation is, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

SHOWN_EVERY_S, LOGGED_EVERY_S = 0.5, 30.0
"""On a terminal, and elsewhere."""


class ProgressLine:
    """On a terminal one line, which makes room for the result; elsewhere, as in a log, a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._every_s = SHOWN_EVERY_S if self._is_terminal else LOGGED_EVERY_S
        self._told_at = time.monotonic()

    def tell(self, words: Callable[[], str]) -> None:
        """It has got on. Asks for `words` only when it is time to say so."""
        now = time.monotonic()
        if now - self._told_at < self._every_s:
            return
        self._told_at = now
        if self._is_terminal:
            print(f"\r{words()}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(words(), file=sys.stderr, flush=True)

    def clear(self) -> None:
        """The result comes."""
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
