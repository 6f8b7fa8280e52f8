"""Says on the log that junk came, without letting whoever sends it fill the log."""

from __future__ import annotations

import logging
import threading

from twinpool.clock import Clock, MonotonicClock

SAY_EVERY_S = 10.0
MOST_CHARACTERS = 500


class JunkLog:
    """At most one warning in `SAY_EVERY_S` goes to `log`; it tells how many were left out before it. Any thread."""

    def __init__(self, log: logging.Logger, clock: Clock | None = None) -> None:
        self._log = log
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._next_at: float | None = None
        self._num_unsaid = 0

    def say(self, text: str) -> None:
        """Warns with the beginning of `text`, or counts it as left out."""
        now = self._clock.now()
        with self._lock:
            if self._next_at is not None and now < self._next_at:
                self._num_unsaid += 1
                return
            self._next_at = now + SAY_EVERY_S
            num_unsaid, self._num_unsaid = self._num_unsaid, 0
        unsaid = f" (and {num_unsaid} more since the last such line)" if num_unsaid else ""
        self._log.warning("%s%s", text[:MOST_CHARACTERS], unsaid)
