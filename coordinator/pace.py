"""How fast the queue moves and prompts are computed, as measured: what predictions are made of."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, linear_regression
from typing import NamedTuple

WINDOW_S = 20.0
LEAST_MEMORY = 16
MOST_MEMORY = 64
"""How many departures the sums reach back: about those of `WINDOW_S`, but at least and at most these."""
LEAST_EVIDENCE_S = 0.2
"""Before the first departure, an interval that has been open for so long tells something."""
MARGIN = 2.5
"""Standard deviations by which a predicted wait exceeds its mean, so that of those admitted none in thousands times out
(`tests/world/test_admission.py`).
"""
REMEMBERED_PROMPTS = 64
REMEMBERED_ANSWERS = 64


class _Sums(NamedTuple):
    """Sums over intervals, each counted by its weight: 1 for the latest, less for older ones."""

    weight: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    seconds_squared: float = 0.0
    seconds_by_tokens: float = 0.0
    tokens_squared: float = 0.0


class Pace:
    """How long it takes until requests leave the queue, from the intervals between departures.

    An interval counts if somebody waited all the time between two departures: it shows what the workers can do, and
    nothing else. A straight line is laid through the intervals over the tokens that the request before had to prefill:
    its slope is the time per token, and what remains is the time per request. Older intervals count less. The interval
    that is still open counts, too, once it is longer than the mean.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_whole = False
        self._last_tokens = 0
        self._sums = _Sums()

    def observe(self, now: float, is_waiting: bool) -> None:
        """Says whether anybody waits at `now`: intervals between departures count only while somebody does."""
        if not is_waiting:
            self._since = None
        elif self._since is None:
            self._since, self._is_whole = now, False

    def departed(self, num_tokens: int, now: float) -> None:
        """A request with that many tokens to prefill has left the queue for a worker."""
        if self._since is not None:
            if self._is_whole:
                self._sums = self._with(now - self._since)
            self._since, self._is_whole = now, True
        self._last_tokens = num_tokens

    def seconds_for(self, num_departures: int, num_tokens: int, now: float) -> float | None:
        """Predicted time until `num_departures` requests have left; all but the last of them have `num_tokens` to
        prefill. Includes a margin of `MARGIN` standard deviations. None without evidence.
        """
        open_s = 0.0 if self._since is None else now - self._since
        sums = self._sums
        if open_s * sums.weight > sums.seconds:
            sums = self._with(open_s)
        elif not sums.weight and open_s >= LEAST_EVIDENCE_S:
            return self._guess_s(num_departures, num_tokens, open_s)
        if not sums.weight:
            return None
        num = sums.weight
        mean_s, mean_tokens = sums.seconds / num, sums.tokens / num
        covariance = sums.seconds_by_tokens / num - mean_s * mean_tokens
        spread = sums.tokens_squared / num - mean_tokens**2
        per_token_s = min(max(0.0, covariance / spread), mean_s / mean_tokens) if spread > 1e-6 else 0.0
        per_request_s = mean_s - per_token_s * mean_tokens
        variance = (
            sums.seconds_squared / num - mean_s**2 - 2 * per_token_s * covariance + per_token_s**2 * spread
        )
        # A sample's deviation: the fewer intervals are known, the less their own mean says.
        deviation_s = math.sqrt(max(0.0, variance) * num / max(num - 1, 0.5))
        margin_s = MARGIN * math.sqrt(num_departures + num_departures**2 / num) * deviation_s
        wait_s = num_departures * per_request_s + (self._last_tokens + num_tokens) * per_token_s + margin_s
        # What has passed of the open interval is taken off, up to the shortest that an interval should be.
        return max(0.0, wait_s - min(open_s, max(0.0, mean_s - MARGIN * deviation_s)))

    def _guess_s(self, num_departures: int, num_tokens: int, open_s: float) -> float:
        """What `seconds_for` makes of the first interval alone, while it is open: half of it has passed, as good a
        guess as any, and requests with fewer tokens than the one that began it take proportionally less."""
        interval_s = 2 * open_s
        all_alike_s = (num_departures - 1) * interval_s
        if not self._last_tokens:
            return interval_s - open_s + all_alike_s
        return interval_s - open_s + min(all_alike_s, interval_s * num_tokens / self._last_tokens)

    def _with(self, interval_s: float) -> _Sums:
        """The sums with one more interval: the one that the request that left last began."""
        keep = min(max(math.exp(-interval_s / WINDOW_S), 1 - 1 / LEAST_MEMORY), 1 - 1 / MOST_MEMORY)
        tokens = self._last_tokens
        new = _Sums(1.0, interval_s, tokens, interval_s**2, interval_s * tokens, tokens**2)
        return _Sums(*(old * keep + value for old, value in zip(self._sums, new, strict=True)))


class Stays:
    """How long requests stay with workers, from the last `REMEMBERED_ANSWERS` that were answered."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_ANSWERS)

    def observe(self, seconds: float) -> None:
        """A request was answered so long after its last attempt began."""
        self._seconds.append(seconds)

    def seconds_until_left(self, num_departures: int, num_in_flight: int) -> float | None:
        """Predicted time until so many of requests that take turns at `num_in_flight` places have left; None without
        evidence."""
        if not self._seconds:
            return None
        return fmean(self._seconds) * num_departures / max(1, num_in_flight)


class AnswerLengths:
    """How many tokens answers have, from the last `REMEMBERED_ANSWERS` of them."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED_ANSWERS)

    def observe(self, num_tokens: int) -> None:
        """An answer of so many tokens is complete."""
        self._lengths.append(num_tokens)

    def expected(self, most: int) -> float:
        """The mean length of answers that have at most `most` tokens; `most` without evidence."""
        if not self._lengths:
            return most
        return fmean(min(length, most) for length in self._lengths)


class PrefillPace:
    """How long prefill workers compute prompts, from the last `REMEMBERED_PROMPTS` of them."""

    def __init__(self) -> None:
        self._num_tokens: deque[float] = deque(maxlen=REMEMBERED_PROMPTS)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_PROMPTS)
        self._sums: tuple[float, float] | None = None
        """Of both, since the last prompt."""
        self.num_timed = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Takes in how long a prompt took of which `num_tokens` were in no cache."""
        self._num_tokens.append(num_tokens)
        self._seconds.append(seconds)
        self._sums = None
        self.num_timed += 1

    def least_seconds_for(self, num_tokens: int) -> float:
        """Seconds for one prompt with so many tokens to compute, at the best rate measured; 0 without evidence."""
        rates = (s / max(1.0, n) for n, s in zip(self._num_tokens, self._seconds, strict=True))
        return num_tokens * min(rates, default=0.0)

    def seconds_before(self, num_tokens: int) -> float:
        """Predicted time until so many tokens that wait before a prompt are computed; 0 without evidence."""
        if self._sums is None:
            self._sums = sum(self._seconds), sum(self._num_tokens)
        return num_tokens * self._sums[0] / max(1.0, self._sums[1])

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
