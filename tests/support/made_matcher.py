"""A grammar that no library is needed for: the token after n others is one of every third, counted from n."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinpool.request import Grammar, GrammarKind

ANY = Grammar(GrammarKind.REGEX, "any")
"""A grammar of any name, for those who give `MadeMatcher` for it."""


class MadeMatcher:
    """As `engine.past.Matcher`. `accepted` are the tokens so far; after `most` of them nothing may follow, and a token
    that was not allowed is an error."""

    def __init__(self, vocab_size: int, most: int = 1 << 30) -> None:
        self.accepted: list[int] = []
        self.error = ""
        self._vocab_size = vocab_size
        self._most = most

    def allows(self, token_id: int) -> bool:
        """Whether it may be the next one."""
        return len(self.accepted) < self._most and token_id % 3 == len(self.accepted) % 3

    def accept(self, token_id: int) -> None:
        """As `Matcher.accept`."""
        if not self.allows(token_id):
            self.error = f"token {token_id} was not allowed"
        self.accepted.append(token_id)

    def mask(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """As `Matcher.mask`."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[: self._vocab_size] = [self.allows(token_id) for token_id in range(self._vocab_size)]
        if not bits.any():
            self.error = self.error or "its grammar allows no token here"
        return np.packbits(bits, bitorder="little").view(np.int32)
