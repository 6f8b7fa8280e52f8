"""Streams the text of token ids as they come: only what is final, never half a character."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from twinpool.engine.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 16
_SYNCHRONIZED_CHARS = 4
"""A decoder that starts inside a UTF-8 character is in step again after 3 bytes, so after 4 characters."""


class IncrementalDetokenizer:
    """The text of one output. What all calls return, joined, is `tokenizer.decode` of all ids, however split.

    Decoding a token needs its left context (the first word of a text loses its leading space, a character may
    spread over several tokens), so a window of the last few tokens is kept and decoded with each new one:
    what a token costs does not depend on the length of the text.

    Held back is what later tokens could still change: a last character U+FFFD, which may be half of another
    one, and a run of byte tokens (``<0xE2>``) until it has ended, because it becomes characters or U+FFFDs as
    a whole.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: Collection[int] = ()
    ) -> None:
        """`shown` are special tokens that are text even where `skip_special_tokens` leaves them out."""
        self._backend = tokenizer.backend
        self._alone = tokenizer.alone
        self._hidden = tokenizer.special_token_ids - set(shown) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text that were returned
        self._in_byte_run = False

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that became final with `token_ids`, perhaps empty."""
        return "".join(map(self._add, token_ids))

    def finish(self) -> str:
        """The rest, when no more ids come: what was held back."""
        text = self._text(self._window)[self._num_given :]
        self._num_given += len(text)
        return text

    def _add(self, token_id: int) -> str:
        alone = self._alone(token_id)
        if alone is None or token_id in self._hidden:
            return ""
        given = self._give_window() if self._in_byte_run and not alone.is_byte else ""
        self._in_byte_run = alone.is_byte
        self._window.append(token_id)
        return given if alone.is_byte else given + self._give_window()

    def _give_window(self) -> str:
        text = self._text(self._window)
        if not text.endswith(_REPLACEMENT) or self._in_byte_run:
            given = text[self._num_given :]
            if self._window:
                last = self._window[-1]
                alone = self._alone(last)
                assert alone is not None, "a window has tokens of the vocabulary only"
                self._window, self._num_given = [last], alone.num_chars
            return given
        given = text[self._num_given : -1]
        self._num_given += len(given)
        if len(self._window) > _MAX_WINDOW:
            self._cut_window(text)
        return given

    def _cut_window(self, text: str) -> None:
        """Forgets the older part of a window that never ends in a whole character, if nothing changes."""
        older, newer = self._window[: -_MAX_WINDOW // 2], self._window[-_MAX_WINDOW // 2 :]
        older_text, newer_text = self._text(older), self._text(newer)
        if older_text + newer_text == text and len(newer_text) >= _SYNCHRONIZED_CHARS:
            self._window = newer
            self._num_given -= len(older_text)

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text
