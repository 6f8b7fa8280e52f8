"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from twinpool.coordinator.gateway.tools.call_grammar import arguments_of, mark_expression, objects
from twinpool.coordinator.gateway.tools.call_parser import Call, CallParser
from twinpool.coordinator.gateway.tools.fields import FunctionDefinition
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps, begun
from twinpool.coordinator.gateway.tools.tool_format import ToolFormat
from twinpool.engine import lark

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


class HermesFormat(ToolFormat):
    """Hermes 2 and 3, Qwen 2.5 and 3, and whoever has learned from them."""

    marks = (OPEN, CLOSE)

    def parser(self, tool_names: Collection[str], most_calls: int | None) -> HermesParser:
        """Reads calls between tags."""
        return HermesParser(self.make_id, tool_names, most_calls)

    def grammar(self, functions: Sequence[FunctionDefinition], *, is_single: bool) -> str:
        """Each call on lines of its own between tags."""
        opening, closing = (mark_expression(tag, self._added_token_ids) for tag in self.marks)
        line = lark.literal("\n")
        return (
            f"start: call{'' if is_single else f' ({line} call)*'}\n"
            f"call: {opening} {line} body {line} {closing}\n"
            f"body: {objects(functions, 'arguments')}\n"
            f"{arguments_of(functions)}"
        )
