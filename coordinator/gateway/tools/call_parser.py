"""What the parsers of all formats share: content around calls, and a call as a JSON object with a name and arguments.

The text of the arguments is passed on as the model wrote it, from its first bracket on: what has begun as a call stays
one. An object that turns out to be no call before that is content, to the last character.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from twinpool.coordinator.gateway.deltas import Delta
from twinpool.coordinator.gateway.tools.reader import SPACE, JsonText, Steps, TextReader
from twinpool.coordinator.gateway.tools.writer import DeltaWriter

_KEYS_OF_CALLS = frozenset({"name", "arguments", "parameters", "type", "id"})
_ENDS_OF_SCALARS = ",}]" + SPACE


@dataclass(slots=True)
class Call:
    """What of a call's object has been read. Without `has_mark` it stands among text, and is a call only if it has
    arguments, the name of a tool and nothing that calls do not have."""

    has_mark: bool = True
    name: str = ""
    arguments: str | None = None
    has_begun: bool = False


class CallParser(ABC):
    """A `DeltaParser` of answers with calls. `tool_names` are the tools that the request offers."""

    separators: ClassVar[str] = ""

    def __init__(
        self, make_id: Callable[[], str], tool_names: Collection[str] = (), most_calls: int | None = None
    ) -> None:
        self._tool_names = tool_names
        self._reader = TextReader()
        self._writer = DeltaWriter(make_id, most_calls, self.separators)
        self._steps = self._answer()

    def add(self, text: str) -> list[Delta]:
        """The deltas that `text` completes."""
        self._reader.feed(text)
        next(self._steps, None)
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """The answer has ended: the deltas of what was held back."""
        self._reader.end()
        next(self._steps, None)
        self._writer.end()
        return self._writer.take()

    @abstractmethod
    def _marks(self) -> tuple[str, ...]:
        """What calls begin with, and what else is not content now."""

    @abstractmethod
    def _read_mark(self, mark: str) -> Steps[None]:
        """Reads `mark`, which comes next, and what belongs to it."""

    def _last_content(self, text: str) -> str:
        """What of `text`, the last of the answer, is content."""
        return text

    def _answer(self) -> Steps[None]:
        while True:
            text, mark = yield from self._reader.take_until(self._marks())
            if self._reader.is_at_end:
                self._writer.content(self._last_content(text))
                return
            self._writer.content(text)
            if mark:
                yield from self._read_mark(mark)

    def _read_object(self, call: Call) -> Steps[bool]:
        """Reads the object of a call; false if it is none, and nothing of it was written."""
        reader = self._reader
        if not (yield from reader.take_word("{")):
            return False
        yield from reader.take_of(SPACE)
        while not (yield from reader.take_word("}")):
            if not (yield from self._read_member(call)):
                return call.has_begun
            yield from reader.take_of(SPACE)
            if (yield from reader.take_word(",")):
                yield from reader.take_of(SPACE)
            elif not (yield from reader.begins_with("}")):
                return call.has_begun
        if call.name and call.has_mark and not call.has_begun:
            call.arguments = "{}"
            self._begin(call)
        return call.has_begun

    def _read_member(self, call: Call) -> Steps[bool]:
        """Reads a key, a colon and a value; false if they cannot be a call's."""
        reader = self._reader
        key = yield from self._read_string()
        yield from reader.take_of(SPACE)
        if key is None or not (yield from reader.take_word(":")):
            return False
        yield from reader.take_of(SPACE)
        if key == "name" and not call.name:
            call.name = (yield from self._read_string()) or ""
            is_fine = self._can_call(call)
        elif key in ("arguments", "parameters") and call.arguments is None:
            is_fine = yield from self._read_arguments(call)
        elif call.has_mark or key in _KEYS_OF_CALLS:
            is_fine = yield from self._skip_value()
        else:
            is_fine = False
        if is_fine and call.name and call.arguments is not None and not call.has_begun:
            self._begin(call)
        return is_fine

    def _read_arguments(self, call: Call) -> Steps[bool]:
        """Reads the arguments: an object, the text of one as a string, or null. Those of a call whose name is known are
        written as they come; else they are in `call`."""
        match (yield from self._reader.peek()):
            case "{":
                call.arguments = ""
                if call.name:
                    self._begin(call)
                return (yield from self._read_json(call))
            case '"':
                text = yield from self._read_string()
                call.arguments = text if text is not None and _is_object(text) else None
                return call.arguments is not None
            case _:
                call.arguments = "{}"
                return (yield from self._reader.take_word("null"))

    def _read_json(self, call: Call) -> Steps[bool]:
        text = JsonText()
        held: list[str] = []
        while not text.is_complete:
            if not (yield from self._reader.more()):
                return False
            piece = self._reader.scan(text)
            if call.has_begun:
                self._writer.arguments(piece)
            else:
                held.append(piece)
            if text.is_broken:
                return False
        if held:
            call.arguments = "".join(held)
        return True

    def _begin(self, call: Call) -> None:
        """From here on it is a call."""
        call.has_begun = True
        self._reader.forget()
        self._writer.begin_call(call.name)
        self._writer.arguments(call.arguments or "")

    def _can_call(self, call: Call) -> bool:
        # What cannot be printed (half of a surrogate pair) could not be sent either.
        return bool(call.name) and (
            call.name.isprintable() if call.has_mark else call.name in self._tool_names
        )

    def _read_string(self) -> Steps[str | None]:
        if (yield from self._reader.peek()) != '"':
            return None
        text = JsonText()
        pieces: list[str] = []
        while not text.is_complete:
            if not (yield from self._reader.more()):
                return None
            pieces.append(self._reader.scan(text))
        try:
            value: str = json.loads("".join(pieces), strict=False)
        except ValueError:
            return None
        return value

    def _skip_value(self) -> Steps[bool]:
        char = yield from self._reader.peek()
        if char and char in '{["':
            text = JsonText()
            while not (text.is_complete or text.is_broken):
                if not (yield from self._reader.more()):
                    return False
                self._reader.scan(text)
            return text.is_complete
        num_chars = 0
        while (char := (yield from self._reader.peek())) and char not in _ENDS_OF_SCALARS:
            self._reader.take(1)
            num_chars += 1
        return num_chars > 0


def _is_object(text: str) -> bool:
    try:
        text.encode()
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False
