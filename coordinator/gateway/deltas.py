"""What the text of an answer says, part by part: content, reasoning, calls of tools.

A `DeltaParser` stands between an answer's text and the shape that writes it. However the text is cut into pieces, the
deltas add up to the same; adjacent deltas of one kind may be joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the answer says. `text` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers. `text` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The answer calls the tool `name`. `index` counts the answer's calls from 0; `id` is what the tool's result will
    refer to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of call `index`'s arguments, after its `ToolCallBegin`. `text` is not empty."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallBegin | ToolCallArguments


class DeltaParser(Protocol):
    """Reads one answer. Never raises: what it does not understand is content."""

    def add(self, text: str) -> list[Delta]:
        """The deltas that `text` completes, perhaps none."""
        ...

    def finish(self) -> list[Delta]:
        """The rest, when the answer has ended: what was held back. Called once, nothing is added afterwards."""
        ...


MakeParser = Callable[[], DeltaParser]
"""Makes the parser of one answer: of `n` answers each has its own."""


class PlainText:
    """A `DeltaParser` of answers that are content and nothing else."""

    def add(self, text: str) -> list[Delta]:
        """The text as it is."""
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is held back."""
        return []


def read(parser: DeltaParser, text: str, *, is_last: bool) -> list[Delta]:
    """The deltas of the next part of an answer's text; of the last part, what was held back too."""
    deltas = parser.add(text) if text else []
    return [*deltas, *parser.finish()] if is_last else deltas
