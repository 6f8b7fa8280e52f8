"""Calls as Llama 3 models write them: `{"name": …, "parameters": {…}}`, perhaps behind `<|python_tag|>`, several with a
semicolon between them.

Without the tag nothing marks a call. What counts as one then has arguments, the name of a tool that the request offers,
and no other keys than calls have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from twinpool.coordinator.gateway.tools.call_grammar import arguments_of, objects
from twinpool.coordinator.gateway.tools.call_parser import Call, CallParser
from twinpool.coordinator.gateway.tools.fields import FunctionDefinition
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps
from twinpool.coordinator.gateway.tools.tool_format import ToolFormat

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


class Llama3Format(ToolFormat):
    """Llama 3.1 to 3.3, and 4 where it writes JSON. The tag is no help where text leaves it out, so it may."""

    def parser(self, tool_names: Collection[str], most_calls: int | None) -> Llama3Parser:
        """Reads objects with parameters."""
        return Llama3Parser(self.make_id, tool_names, most_calls)

    def grammar(self, functions: Sequence[FunctionDefinition], *, is_single: bool) -> str:  # noqa: ARG002
        """One call: of more in a message these models' templates say that they know none."""
        return f"start: {objects(functions, 'parameters')}\n{arguments_of(functions)}"
