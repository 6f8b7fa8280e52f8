"""Token sequences that must not occur in an answer: which tokens would complete one, after those that it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BadWords:
    """Follows one answer. Each token costs the same however long the answer is, and however many sequences there are.

    As in vLLM, a sequence counts within the answer only: it does not begin in the prompt.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], output: Sequence[int]) -> None:
        """`sequences` have a token each at least; `output` are the answer's tokens so far."""
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *first, last in sequences:
            self._last.setdefault(tuple(first), []).append(last)
        self._lengths = sorted({len(first) for first in self._last})
        longest = max(self._lengths, default=0)
        self._recent = deque(output[-longest:] if longest else (), maxlen=longest)

    def add(self, token_id: int) -> None:
        """The answer goes on with `token_id`."""
        self._recent.append(token_id)

    def next_banned(self) -> list[int]:
        """The tokens that would complete a sequence now; some perhaps more than once."""
        recent = tuple(self._recent)
        return [
            token_id
            for length in self._lengths
            if length <= len(recent)
            for token_id in self._last.get(recent[len(recent) - length :], ())
        ]
