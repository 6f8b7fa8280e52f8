"""Calls as Mistral models write them, behind `[TOOL_CALLS]`: a list of `{"name": …, "arguments": {…}}`, or, since 2025,
a name, `[ARGS]` and the arguments."""

from __future__ import annotations

import string

from twinpool.coordinator.gateway.tools.call_parser import Call, CallParser
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OF_NAMES = string.ascii_letters + string.digits + "_-."


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
