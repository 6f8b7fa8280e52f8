"""How long a hybrid worker's steps take, from the last ones: how many prompt tokens one can have beside its streams."""

from __future__ import annotations

from collections import deque
from statistics import fmean, linear_regression

from twinpool.step_pace import LEAST_CHUNK_TOKENS, StepPace

REMEMBERED_STEPS = 64
RARELY = 0.9
"""One step in ten takes longer than this part of the others."""
MOST_GROWTH = 2
"""No chunk is larger than this many times the largest that was measured: a straight line holds only near its points."""


class StepTimes:
    """A straight line through what was measured.

    Steps without prompt tokens tell the time per step and per sequence; what others take beyond that is the time per
    prompt token. Steps with fewer prompt tokens than `LEAST_CHUNK_TOKENS` tell nothing of it. A step is planned so that
    it would keep its limit even if it took longer than the line says, by as much as one in ten of the last ones did.
    """

    def __init__(self) -> None:
        self._decodes: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_STEPS)
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED_STEPS)
        self._overruns: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._largest_chunk = 0

    def observe(self, num_sequences: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of so many sequences that decode and so many prompt tokens has taken so long."""
        if not num_prompt_tokens:
            self._decodes.append((num_sequences, seconds))
        elif num_prompt_tokens >= LEAST_CHUNK_TOKENS:
            if (pace := self.pace) is not None:
                expected_s = pace.prompt_s(num_prompt_tokens, num_sequences, num_prompt_tokens)
                if expected_s > 0:
                    self._overruns.append(seconds / expected_s)
            self._chunks.append((num_sequences, num_prompt_tokens, seconds))
            self._largest_chunk = max(self._largest_chunk, num_prompt_tokens)

    @property
    def pace(self) -> StepPace | None:
        """What the measured steps say; None before there are some of both kinds."""
        if not self._decodes or not self._chunks:
            return None
        counts, seconds = zip(*self._decodes, strict=True)
        mean_count, mean_s = fmean(counts), fmean(seconds)
        slope = linear_regression(counts, seconds).slope if min(counts) < max(counts) else 0.0
        sequence_s = min(max(0.0, slope), mean_s / mean_count)
        # Rounding leaves a hair below 0, which no message may carry.
        base_s = max(0.0, mean_s - sequence_s * mean_count)
        beyond_s = sum(seconds - base_s - num * sequence_s for num, _, seconds in self._chunks)
        num_tokens = sum(tokens for _, tokens, _ in self._chunks)
        return StepPace(base_s, sequence_s, max(0.0, beyond_s) / num_tokens)

    def prompt_tokens_within(self, limit_s: float, num_sequences: int) -> int:
        """The prompt tokens that the next step can have and be over within `limit_s`. Where nothing is known: the
        fewest that tell something."""
        pace = self.pace
        if pace is None:
            return LEAST_CHUNK_TOKENS
        most = max(LEAST_CHUNK_TOKENS, MOST_GROWTH * self._largest_chunk)
        overrun = sorted(self._overruns)[int(RARELY * len(self._overruns))] if self._overruns else 1.0
        return min(pace.prompt_tokens_within(limit_s / max(1.0, overrun), num_sequences), most)
