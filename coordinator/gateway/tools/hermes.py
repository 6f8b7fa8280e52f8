"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar

from twinpool.coordinator.gateway.tools.call_parser import Call, CallParser
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps, begun

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Reads calls between their tags. A closing tag that is missing or late changes nothing, nor does a bracket too
    many before it."""

    separators: ClassVar[str] = "}]"

    def __init__(
        self, make_id: Callable[[], str], tool_names: Collection[str] = (), most_calls: int | None = None
    ) -> None:
        super().__init__(make_id, tool_names, most_calls)
        self._is_open = False

    def _marks(self) -> tuple[str, ...]:
        return (OPEN, CLOSE) if self._is_open else (OPEN,)

    def _read_mark(self, mark: str) -> Steps[None]:
        if mark == CLOSE:
            self._reader.take(len(mark))
            self._writer.drop_gap()
            self._is_open = False
            return
        self._reader.keep()
        self._reader.take(len(mark))
        yield from self._reader.take_of(SPACE)
        if (yield from self._read_object(Call())):
            self._is_open = True
        else:
            self._writer.content(self._reader.kept())

    def _last_content(self, text: str) -> str:
        # An answer that was cut off in its last tag.
        return text[: len(text) - begun(text, CLOSE)] if self._is_open else text
