"""How an answer is written: what each API's shape has to say, and what all of them share.

A reply asks one `Shape` for the bytes of one request's answer. In a stream each choice has a `ChoiceShape`, whose
chunks come between those of other choices: its opening, a delta for each piece (the last one too), its ending. Behind
the last choice comes the shape's closing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from twinpool.coordinator.gateway.answer import Piece
from twinpool.coordinator.gateway.prompts import Prompt
from twinpool.coordinator.gateway.requests import GenerationRequest
from twinpool.coordinator.gateway.token_texts import TokenTexts
from twinpool.coordinator.gateway.usage import Usage
from twinpool.errors import RequestError

KEEP_ALIVE = b": keep-alive\n\n"

to_json = msgspec.json.Encoder().encode


def error_json(error: RequestError) -> bytes:
    """The error in the OpenAI shape."""
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return to_json({"error": body})


UsageSoFar = Callable[[], Usage]
"""Tells what all choices of the answer have taken by now; whoever shows it asks, as that asks each of them."""


@dataclass(frozen=True, slots=True)
class Heading:
    """What is known of an answer before its first token. `request_id` is the one that the client sees, `created` in
    Unix seconds. Choice i is one of prompt i // `wanted.n`."""

    request_id: str
    model: str
    created: int
    wanted: GenerationRequest
    prompts: tuple[Prompt, ...]
    texts: TokenTexts

    def prompt_of(self, choice: int) -> Prompt:
        """The prompt that this choice answers."""
        return self.prompts[choice // self.wanted.n]


class ChoiceShape(ABC):
    """How one choice of a streamed answer is written. Empty bytes: there is nothing to say."""

    @abstractmethod
    def opening(self, first: Piece, usage_so_far: UsageSoFar) -> bytes:
        """What the choice begins with, before `first` is written. Asked again for the next piece if neither this nor
        the delta said anything."""

    @abstractmethod
    def delta(self, piece: Piece) -> bytes:
        """The next piece. Each is given once, and the last one even if it is empty."""

    @abstractmethod
    def ending(self, last: Piece) -> bytes:
        """What the choice ends with, after its `last` piece."""


class Shape(ABC):
    """How one request's answer is written, streamed or whole."""

    id_prefix: ClassVar[str]
    """What stands before the request's id, and a dash (or _), in the answer's."""

    @abstractmethod
    def choice(self, index: int) -> ChoiceShape:
        """A new writer of that choice."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """What ends a stream, after the ending of every choice."""

    @abstractmethod
    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        """The body of an answer that is not streamed: `answers` has all of each choice, in one piece."""

    def error_event(self, error: RequestError) -> bytes:
        """What ends a stream that failed. Nothing follows it."""
        return b"data: " + error_json(error) + b"\n\n"


class OneChoiceShape(Shape):
    """How an answer is written on routes that give one: its pieces go to the shape itself."""

    def choice(self, index: int) -> ChoiceShape:  # noqa: ARG002  # there is one
        """The writer of the only choice."""
        return _OnlyChoice(self)

    @abstractmethod
    def opening(self, usage: Usage) -> bytes:
        """The events before those of the first piece, when the answer has taken `usage`."""

    @abstractmethod
    def add(self, piece: Piece) -> bytes:
        """The events of the next piece, the last one among them."""


class _OnlyChoice(ChoiceShape):
    def __init__(self, shape: OneChoiceShape) -> None:
        self._shape = shape

    def opening(self, first: Piece, usage_so_far: UsageSoFar) -> bytes:  # noqa: ARG002  # nothing of it is shown here
        return self._shape.opening(usage_so_far())

    def delta(self, piece: Piece) -> bytes:
        return self._shape.add(piece)

    def ending(self, last: Piece) -> bytes:  # noqa: ARG002  # the closing says it
        return b""
