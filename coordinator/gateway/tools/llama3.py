"""Calls as Llama 3 models write them: `{"name": …, "parameters": {…}}`, perhaps behind `<|python_tag|>`, several with a
semicolon between them.

Without the tag nothing marks a call. What counts as one then has arguments, the name of a tool that the request offers,
and no other keys than calls have.
"""

from __future__ import annotations

from typing import ClassVar

from twinpool.coordinator.gateway.tools.call_parser import Call, CallParser
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps

TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Finds calls wherever they stand in the answer."""

    separators: ClassVar[str] = ";"

    def _marks(self) -> tuple[str, ...]:
        return (TAG, "{")

    def _read_mark(self, mark: str) -> Steps[None]:
        self._reader.keep()
        if mark == TAG:
            self._reader.take(len(mark))
            yield from self._reader.take_of(SPACE)
        if not (yield from self._read_object(Call(has_mark=mark == TAG))):
            self._writer.content(self._reader.kept())
