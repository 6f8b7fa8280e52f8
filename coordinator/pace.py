"""How fast the queue moves and prompts are computed, as measured: what predictions are made of."""

from __future__ import annotations

import math
from collections import deque
from statistics import linear_regression

WINDOW_S = 10.0
LEAST_KEPT = 7 / 8
LEAST_EVIDENCE_S = 0.5
MARGIN = 1.0
"""Standard deviations by which a predicted wait exceeds its mean: what is admitted should not time out."""
REMEMBERED_PROMPTS = 64


class Pace:
    """How long it takes until requests leave the queue, from the intervals between departures.

    An interval counts if somebody waited all the time between two departures: it shows what the workers can do, and
    nothing else. Sums decay with e^(−interval / `WINDOW_S`), but keep `LEAST_KEPT`, so that slow servers
    have a history too. An interval that is open for longer than usual counts as one of that length.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_whole = False
        self._num = 0.0
        self._seconds = 0.0
        self._squares = 0.0
        self._tokens = 0.0

    def observe(self, now: float, is_waiting: bool) -> None:
        """Somebody waits now, or nobody."""
        if not is_waiting:
            self._since = None
        elif self._since is None:
            self._since, self._is_whole = now, False

    def departed(self, num_tokens: int, now: float) -> None:
        """A request with that many tokens to prefill has left the queue for a worker."""
        if self._since is not None and self._is_whole:
            interval_s = now - self._since
            keep = max(math.exp(-interval_s / WINDOW_S), LEAST_KEPT)
            self._num = self._num * keep + 1
            self._seconds = self._seconds * keep + interval_s
            self._squares = self._squares * keep + interval_s**2
            self._tokens = self._tokens * keep + num_tokens
        if self._since is not None:
            self._since, self._is_whole = now, True

    def seconds_for(self, num_departures: int, num_tokens: int, now: float) -> float | None:
        """Predicted time until so many requests, and so many tokens with them, have left; None without evidence."""
        num, seconds, squares, tokens = self._num, self._seconds, self._squares, self._tokens
        open_s = 0.0 if self._since is None else now - self._since
        if open_s * num > seconds or (num == 0 and open_s >= LEAST_EVIDENCE_S):
            num, seconds, squares = num + 1, seconds + open_s, squares + open_s**2
        if num == 0:
            return None
        mean_s = seconds / num
        variance = max(0.0, squares / num - mean_s**2)
        wait_s = num_departures * mean_s + MARGIN * math.sqrt(num_departures * variance)
        if tokens > 0:
            wait_s = max(wait_s, num_tokens * seconds / tokens)
        return max(0.0, wait_s - min(open_s, mean_s))


class PrefillPace:
    """How long prefill workers compute prompts, from the last `REMEMBERED_PROMPTS` of them."""

    def __init__(self) -> None:
        self._num_tokens: deque[float] = deque(maxlen=REMEMBERED_PROMPTS)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_PROMPTS)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prompt with so many tokens that were in no cache was computed in so long."""
        self._num_tokens.append(num_tokens)
        self._seconds.append(seconds)

    def seconds_before(self, num_tokens: int) -> float:
        """Predicted time until so many tokens that wait before a prompt are computed; 0 without evidence."""
        return num_tokens * sum(self._seconds) / max(1.0, sum(self._num_tokens))

    def seconds_for(self, num_tokens: int) -> float:
        """Predicted time for one prompt with so many tokens to compute; 0 without evidence.

        A straight line through what was measured; if that was all of one length, shorter prompts are taken to need
        proportionally less, and longer ones no more.
        """
        if not self._seconds:
            return 0.0
        mean_tokens = sum(self._num_tokens) / len(self._num_tokens)
        mean_s = sum(self._seconds) / len(self._seconds)
        if min(self._num_tokens) == max(self._num_tokens):
            return mean_s * min(1.0, num_tokens / max(1.0, mean_tokens))
        slope = max(0.0, linear_regression(self._num_tokens, self._seconds).slope)
        return max(0.0, mean_s + slope * (num_tokens - mean_tokens))
