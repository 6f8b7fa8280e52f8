"""Reads what a model thinks before it answers: `<think>…</think>`, as Qwen3, DeepSeek R1 and many others write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from twinpool.coordinator.gateway.deltas import Delta, DeltaParser, Reasoning
from twinpool.coordinator.gateway.tools.call_grammar import mark_expression
from twinpool.coordinator.gateway.tools.reader import SPACE, Steps, TextReader
from twinpool.engine import lark
from twinpool.errors import InvariantViolation
from twinpool.request import Grammar, GrammarKind

OPEN, CLOSE = "<think>", "</think>"
_ANY = r"(.|\n)*"
_CLOSE = r"<\/think>"
_SPELLED = re.compile(r"\\.|/|\n")


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
        """The answer has ended: the deltas of what was held back."""
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


class ThinkFormat:
    """The format, for a model whose vocabulary has `added_token_ids`, by their texts. `marks` must be in the text."""

    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, added_token_ids: Mapping[str, int]) -> None:
        self._added_token_ids = added_token_ids

    def parser(self, prompt: str, answer: DeltaParser) -> ThinkParser:
        """The parser of one answer to `prompt`, as the chat template wrote it; `answer` reads what follows."""
        return ThinkParser(answer, is_open=_last_mark(prompt) == OPEN)

    def before(self, grammar: Grammar, prompt: str) -> Grammar:
        """`grammar`, which has been checked, with reasoning before it, as far as an answer to `prompt` has any: the
        template may have opened it, or closed it."""
        last = _last_mark(prompt)
        if last == CLOSE:
            return grammar
        opening, closing = (mark_expression(text, self._added_token_ids) for text in self.marks)
        # A token ends whatever is before it; a text must be the first of its kind.
        is_token = CLOSE in self._added_token_ids
        rest = (
            rf"rest: /{_ANY}/ {closing} gap?" if is_token else f"rest: end gap?\nend[lazy]: /{_ANY}{_CLOSE}/"
        )
        rules = (
            f"start: {'rest' if last else 'thought?'} answer",
            f"thought: {opening} rest",
            rest,
            r"gap: /[ \n]{1,4}/",
            f"answer: {_embedded(grammar)}",
        )
        return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def _last_mark(prompt: str) -> str:
    """The tag that `prompt` ends with, "" if with none."""
    end = prompt.rstrip(SPACE)
    return next((tag for tag in (OPEN, CLOSE) if end.endswith(tag)), "")


def _embedded(grammar: Grammar) -> str:
    """The grammar as an expression of Lark."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return lark.json_value(json.loads(grammar.source))
        case GrammarKind.REGEX:
            return f"/{_SPELLED.sub(_spelled, grammar.source)}/"
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.source}\n}}"
        case GrammarKind.GBNF:
            raise InvariantViolation("a grammar in GBNF is one in Lark once it is checked")


def _spelled(found: re.Match[str]) -> str:
    """A slash or a line's end as a regular expression between slashes has them; what is escaped stays so."""
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
