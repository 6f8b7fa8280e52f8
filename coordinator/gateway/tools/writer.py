"""Collects the deltas of one answer, and tells what is content from what only stands between calls."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.coordinator.gateway.deltas import Content, Delta, ToolCallArguments, ToolCallBegin
from twinpool.coordinator.gateway.tools.reader import SPACE


class DeltaWriter:
    """The deltas of one answer, to be taken as they come.

    Space before the first call and behind any is content only if other text follows it; between calls, and behind the
    last, it belongs to the calls' notation, and so do `separators`. Of the calls only the first `most_calls` are told
    (None: all).
    """

    def __init__(self, make_id: Callable[[], str], most_calls: int | None, separators: str = "") -> None:
        self._make_id = make_id
        self._most_calls = most_calls
        self._separators = separators
        self._deltas: list[Delta] = []
        self._gap: list[str] = []
        self._is_in_gap = True
        self._is_told = True
        self._num_calls = 0

    def content(self, text: str) -> None:
        """More content, or text between calls."""
        if self._is_in_gap:
            self._gap.append(text)
            if not text.strip(SPACE + self._separators if self._num_calls else SPACE):
                return
            text, self._gap, self._is_in_gap = "".join(self._gap), [], False
        if text:
            self._deltas.append(Content(text))

    def begin_call(self, name: str) -> None:
        """A call of `name`; its arguments follow."""
        self._gap, self._is_in_gap = [], True
        self._is_told = self._most_calls is None or self._num_calls < self._most_calls
        if self._is_told:
            self._deltas.append(ToolCallBegin(self._num_calls, self._make_id(), name))
            self._num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text and self._is_told:
            self._deltas.append(ToolCallArguments(self._num_calls - 1, text))

    def drop_gap(self) -> None:
        """What stood between the last call and here, if nothing but space and separators, belonged to the call."""
        self._gap = []

    def end(self) -> None:
        """The answer has ended: text that was held back is content if no call came before it."""
        if (text := "".join(self._gap)) and not self._num_calls:
            self._deltas.append(Content(text))
        self._gap = []

    def take(self) -> list[Delta]:
        """What was written since it was taken last."""
        deltas, self._deltas = self._deltas, []
        return deltas
