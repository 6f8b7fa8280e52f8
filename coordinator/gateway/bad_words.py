"""Words that an answer must not have, as the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Iterable

from twinpool.bounds import MOST_BAD_WORD_TOKENS
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvalidRequest


def token_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The sequences for `words`, as vLLM has them: each word without the white space before it; and with one space,
    if that begins with another token and takes as many. Neither stands for the word where other tokens spell it.

    Raises:
        InvalidRequest: a word is too long, or has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not 0 < len(bare) <= MOST_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words has {shown(word)}, which is {len(bare)} tokens; each may have 1 to {MOST_BAD_WORD_TOKENS}",
                param="bad_words",
            )
        found[bare] = None
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    return tuple(found)
