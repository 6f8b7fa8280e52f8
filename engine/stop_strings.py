"""Finds stop strings in a stream of text, across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one output. Given the text of one token at a time, it tells at which one a match is complete.

    The match that is complete first ends the output; of several that are complete with the same character,
    the longest one (the one that starts first). So the result does not depend on how the text is split. Text
    that may be the beginning of a stop string is held back. `matched` is the stop string found, None so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings; there may be none of them."""
        if "" in stops:
            raise ValueError("an empty stop string would end every output before it begins")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """What may be shown now. With a match: the text up to the stop string, and from then on nothing."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        matches = [
            (start + len(stop), start, stop) for stop in self._stops if (start := pending.find(stop)) >= 0
        ]
        if matches:
            _, start, self.matched = min(matches)
            self._held = ""
            return pending[:start]
        num_held = max((_num_begun(pending, stop) for stop in self._stops), default=0)
        shown = len(pending) - num_held
        self._held = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """The text held back, when the output ends without a match."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
