"""Calls as Mistral models write them, behind `[TOOL_CALLS]`: a list of `{"name": …, "arguments": {…}}`, or, since 2025,
a name, `[ARGS]` and the arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from twinpool.coordinator.gateway.tools.call_grammar import arguments_of, either, mark_expression, objects
from twinpool.coordinator.gateway.tools.call_parser import Call, CallParser
from twinpool.coordinator.gateway.tools.fields import FunctionDefinition
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps
from twinpool.coordinator.gateway.tools.tool_format import OF_IDS, ToolFormat, random_id
from twinpool.engine import lark

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OF_NAMES = OF_IDS + "_-."
_ID_CHARS = 9


class MistralParser(CallParser):
    """Reads either notation, and a mark before one object."""

    def _marks(self) -> tuple[str, ...]:
        return (MARK,)

    def _read_mark(self, mark: str) -> Steps[None]:
        reader = self._reader
        reader.keep()
        reader.take(len(mark))
        yield from reader.take_of(SPACE)
        match (yield from reader.peek()):
            case "[":
                reader.take(1)
                yield from reader.take_of(SPACE)
                yield from self._read_list()
                return
            case "{":
                is_call = yield from self._read_object(Call())
            case _:
                is_call = yield from self._read_named()
        if not is_call:
            self._writer.content(reader.kept())

    def _read_list(self) -> Steps[None]:
        reader = self._reader
        while (yield from self._read_object(Call())):
            reader.keep()
            yield from reader.take_of(SPACE)
            if (yield from reader.take_word("]")):
                reader.forget()
                return
            if (yield from reader.take_word(",")):
                yield from reader.take_of(SPACE)
            if not (yield from reader.more()):
                return  # cut off between two calls
        self._writer.content(reader.kept())

    def _read_named(self) -> Steps[bool]:
        reader = self._reader
        call = Call(name=(yield from reader.take_of(_OF_NAMES)))
        yield from reader.take_of(SPACE)
        if (yield from reader.take_word(CALL_ID)):
            yield from reader.take_of(_OF_NAMES)
        yield from reader.take_word(ARGS)
        yield from reader.take_of(SPACE)
        if not call.name or (yield from reader.peek()) != "{":
            return False
        yield from self._read_arguments(call)
        return True


class MistralFormat(ToolFormat):
    """Mistral and Mixtral. `is_named`: the notation with `[ARGS]`, else a list, behind `before_list`."""

    marks = (MARK, CALL_ID, ARGS)

    def __init__(
        self, added_token_ids: Mapping[str, int], *, is_named: bool = False, before_list: str = ""
    ) -> None:
        super().__init__(added_token_ids)
        self._is_named = is_named
        self._before_list = before_list

    def parser(self, tool_names: Collection[str], most_calls: int | None) -> MistralParser:
        """Reads either notation."""
        return MistralParser(self.make_id, tool_names, most_calls)

    def grammar(self, functions: Sequence[FunctionDefinition], *, is_single: bool) -> str:
        """In the model's own notation."""
        marked = mark_expression(MARK, self._added_token_ids)
        if self._is_named:
            args = mark_expression(ARGS, self._added_token_ids)
            calls = either(f"{lark.literal(f.name)} {args} args_{i}" for i, f in enumerate(functions))
            rules = f"start: call{'' if is_single else '+'}\ncall: {marked} body\nbody: {calls}\n"
        else:
            more = "" if is_single else f"({lark.literal(', ')} body)*"
            opening = lark.literal(f"{self._before_list}[")
            rules = (
                f"start: {marked} {opening} body {more} {lark.literal(']')}\n"
                f"body: {objects(functions, 'arguments')}\n"
            )
        return rules + arguments_of(functions)

    def make_id(self) -> str:
        """Nine letters and digits: their templates take nothing else."""
        return random_id(_ID_CHARS)

    def id_for_template(self, call_id: str) -> str:
        """The last nine letters and digits of an id from elsewhere."""
        return "".join(char for char in call_id if char in OF_IDS)[-_ID_CHARS:]
