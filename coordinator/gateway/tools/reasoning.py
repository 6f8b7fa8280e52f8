"""Reads what a model thinks before it answers: `<think>…</think>`, as Qwen3, DeepSeek R1 and many others write it."""

from __future__ import annotations

from twinpool.coordinator.gateway.deltas import Delta, DeltaParser, Reasoning
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps, TextReader

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """A `DeltaParser` that hands everything behind the reasoning to `answer`, the parser of the rest.

    `is_open`: the prompt ends with the opening tag, so the answer has none. Else reasoning is what stands between the
    tags at the beginning of the answer, and tags elsewhere are text. Without a closing tag all is reasoning. Space at
    the tags belongs to them.
    """

    def __init__(self, answer: DeltaParser, *, is_open: bool) -> None:
        self._answer = answer
        self._is_open = is_open
        self._reader = TextReader()
        self._deltas: list[Delta] = []
        self._steps = self._run()

    def add(self, text: str) -> list[Delta]:
        """The deltas that `text` completes."""
        self._reader.feed(text)
        return self._go_on()

    def finish(self) -> list[Delta]:
        """What was held back."""
        self._reader.end()
        return self._go_on() + self._answer.finish()

    def _go_on(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _run(self) -> Steps[None]:
        reader = self._reader
        space = yield from reader.take_of(SPACE)
        if (yield from reader.take_word(OPEN)) or self._is_open:
            yield from self._read_reasoning()
        elif space:
            self._deltas += self._answer.add(space)
        while (yield from reader.more()):
            self._deltas += self._answer.add(reader.take_all())

    def _read_reasoning(self) -> Steps[None]:
        reader = self._reader
        yield from reader.take_of(SPACE)
        space = ""
        while True:
            text, mark = yield from reader.take_until((CLOSE,))
            words = text.rstrip(SPACE)
            if words:
                self._deltas.append(Reasoning(space + words))
                space = ""
            space += text[len(words) :]
            if mark:
                reader.take(len(mark))
                yield from reader.take_of(SPACE)
                return
            if not (yield from reader.more()):
                return
