"""Text that comes in pieces, read as if it were all there.

A parser is a generator: where it needs text that is not there yet, it yields, and is resumed when there is more. What
it decides depends on the text alone, never on how it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser; its `return` is what it found."""

SPACE = " \t\r\n"


_OUTSIDE = re.compile(r'["\[\]{}]')
_INSIDE = re.compile(r'["\\]')
_CLOSING = {"{": "}", "[": "]"}


class JsonText:
    """Follows the text of one JSON object, list or string to its end.

    It looks at quotes and brackets only: what a model writes between them is for the client to judge, and a list of
    arguments that lacks a comma still ends where it ends.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False
        self.is_broken = False

    def scan(self, text: str, at: int) -> int:
        """Where the value's part of `text[at:]` ends: behind its last character, before a bracket that does not match,
        or with the text."""
        while at < len(text) and not self.is_complete:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._is_in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            if not self._take(found[0]):
                self.is_broken = True
                return found.start()
            at = found.end()
        return at

    def _take(self, char: str) -> bool:
        """Takes a quote, a bracket or a backslash; false if it has no place here."""
        match char:
            case "\\":
                self._is_escaped = True
                return True
            case '"':
                self._is_in_string = not self._is_in_string
            case "{" | "[":
                self._open.append(_CLOSING[char])
            case _:
                if not self._open or self._open.pop() != char:
                    return False
        self.is_complete = not (self._open or self._is_in_string)
        return True


class TextReader:
    """The text of one answer, and how far it is read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self._has_ended = False

    def feed(self, text: str) -> None:
        """Adds what has come of the text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Says that the text has ended."""
        self._has_ended = True

    @property
    def is_at_end(self) -> bool:
        """Whether the text has ended, and all of it is read."""
        return self._has_ended and self._at == len(self._text)

    def keep(self) -> None:
        """Keeps what is read from here on, until `kept` or `forget`."""
        self._kept = []

    def kept(self) -> str:
        """Returns what was read since `keep`, and keeps it no longer."""
        text = "".join(self._kept or ())
        self.forget()
        return text

    def forget(self) -> None:
        """Keeps what was read since `keep` no longer."""
        self._kept = None

    def more(self) -> Steps[bool]:
        """Waits for text that is not read yet; false if the text has ended."""
        while self._at == len(self._text):
            if self._has_ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def take(self, num_chars: int) -> str:
        """Reads so many characters, which must be there."""
        end = self._at + num_chars
        assert end <= len(self._text), "only what was looked at can be taken"
        text = self._text[self._at : end]
        self._at = end
        if self._kept is not None:
            self._kept.append(text)
        return text

    def take_all(self) -> str:
        """Reads all that has come."""
        return self.take(len(self._text) - self._at)

    def take_of(self, allowed: str) -> Steps[str]:
        """Reads as long as the characters are among `allowed`."""
        taken = ""
        while char := (yield from self.peek()):
            if char not in allowed:
                break
            taken += self.take(1)
        return taken

    def begins_with(self, word: str) -> Steps[bool]:
        """Whether `word` comes next. Reads nothing."""
        while not self._text.startswith(word, self._at):
            if self._has_ended or not word.startswith(self._text[self._at : self._at + len(word)]):
                return False
            yield
        return True

    def take_word(self, word: str) -> Steps[bool]:
        """Reads `word` if it comes next."""
        if not (yield from self.begins_with(word)):
            return False
        self.take(len(word))
        return True

    def take_until(self, words: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """Reads text that is before the next of `words`, and the word that comes then.

        The word is not read. It is "" while it is not there: the text is then as much as is sure to come before any of
        them, not empty unless the text has ended.
        """
        while True:
            if found := _any_of(words).search(self._text, self._at):
                return self.take(found.start() - self._at), found[0]
            if self._has_ended:
                return self.take_all(), ""
            tail = self._text[max(self._at, len(self._text) - max(map(len, words))) :]
            num_begun = max(begun(tail, word) for word in words)
            if num_sure := len(self._text) - self._at - num_begun:
                return self.take(num_sure), ""
            yield

    def scan(self, text: JsonText) -> str:
        """Reads what belongs to `text` of what is there."""
        return self.take(text.scan(self._text, self._at) - self._at)


@cache
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


def begun(text: str, word: str) -> int:
    """How many characters at the end of `text` are the beginning of `word`, and not all of it."""
    at = text.find(word[0], max(0, len(text) - len(word) + 1))
    while at >= 0 and not word.startswith(text[at:]):
        at = text.find(word[0], at + 1)
    return len(text) - at if at >= 0 else 0
