"""Prompts of exactly so many tokens by a given tokenizer, as text or as token ids, from a seed.

A prompt is a row of *words*: pieces of text that are one token each wherever they stand, which is tried out when the
synthesizer is made. So its length is exact by construction, equal pieces are equal text and equal tokens, and there is
nothing to search for; what was made is tokenized again all the same (`check`).
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import tokenizers
from numpy.typing import NDArray

from twinpool.bench.serving.datasets.settings import PromptAs
from twinpool.bench.serving.datasets.shapes import Piece
from twinpool.errors import ConfigError

_MOST_WORDS = 4096
_FEWEST_WORDS = 16
_ROUNDS, _ROW = 3, 16
"""Words are tried in so many random orders, in rows of so many."""
_KEPT_PIECES = 4096
_CHECKED_TOKENS = 2_000_000
"""So many tokens of a workload are tokenized again: about two seconds."""
_TRIED_PROMPTS_PER_BATCH = 64


@dataclass(frozen=True, slots=True)
class Words:
    """Pieces of text that are one token each: `first_ids` where they begin the text, `later_ids` behind another one and
    `separator`."""

    separator: str
    texts: tuple[str, ...]
    first_ids: NDArray[np.int64]
    later_ids: NDArray[np.int64]


class Synthesizer:
    """Makes prompts of pieces. The same seed and tokenizer make the same prompts, in any order. Not for two threads.

    Special tokens that the tokenizer puts around a text count as part of the prompt: the first and the last piece have
    so many words fewer, and token ids contain them, as a server gets them of the text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt_as: PromptAs, seed: int) -> None:
        """Raises ConfigError if no text of a known length can be made for this tokenizer."""
        self._tokenizer = tokenizer
        self._prompt_as = prompt_as
        self._seed = seed
        self._words = find_words(tokenizer)
        self._specials_before, self._specials_after = _specials(tokenizer, self._words.texts[0])
        self._shared_text = lru_cache(_KEPT_PIECES)(self._text_of)

    @property
    def least_tokens(self) -> int:
        """The shortest prompt: a word, and the special tokens around it."""
        return len(self._specials_before) + 1 + len(self._specials_after)

    def prompt(self, pieces: Sequence[Piece]) -> str | tuple[int, ...]:
        """The prompt, as text or ids, of `pieces` that have `least_tokens` together or more."""
        pieces = _without(pieces, len(self._specials_before))
        pieces = _without(pieces[::-1], len(self._specials_after))[::-1]
        if self._prompt_as is PromptAs.TEXT:
            text = "".join(
                self._shared_text(piece) if piece.is_shared else self._text_of(piece) for piece in pieces
            )
            return text.removeprefix(self._words.separator)
        return self._ids(pieces)

    def check(self, prompts: Sequence[object], lengths: Sequence[int]) -> int:
        """Tokenizes the texts among `prompts` again, all or a random choice of as many as have 2 million tokens;
        returns how many.

        Raises:
            ConfigError: one has another length than it was to have.
        """
        order = np.random.default_rng((self._seed, len(prompts))).permutation(len(prompts)).tolist()
        checked = 0
        for batch in _batches([n for n in order if isinstance(prompts[n], str)], lengths):
            encodings = self._tokenizer.encode_batch_fast([str(prompts[n]) for n in batch])
            for number, encoding in zip(batch, encodings, strict=True):
                if len(encoding.ids) != lengths[number]:
                    raise ConfigError(
                        f"prompt {number} was to have {lengths[number]} tokens and has {len(encoding.ids)}: this "
                        "tokenizer joins words; send token ids instead with --prompt-as ids"
                    )
            checked += len(batch)
        return checked

    def _drawn(self, piece: Piece) -> NDArray[np.int64]:
        """Numbers of the words. A shorter piece of the same key is the beginning of a longer one."""
        rng = np.random.default_rng((self._seed, *piece.key))
        return rng.integers(len(self._words.texts), size=piece.num_tokens)

    def _text_of(self, piece: Piece) -> str:
        separator, texts = self._words.separator, self._words.texts
        chosen = self._drawn(piece).tolist()
        return separator + separator.join([texts[number] for number in chosen]) if chosen else ""

    def _ids(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        chosen = np.concatenate([self._drawn(piece) for piece in pieces])
        first = int(self._words.first_ids[chosen[0]])
        later = self._words.later_ids[chosen[1:]].tolist()
        return (*self._specials_before, first, *later, *self._specials_after)


@lru_cache(maxsize=4)
def find_words(tokenizer: tokenizers.Tokenizer) -> Words:
    """Words of the vocabulary (or, if it has none, letters) that stay one token each behind each other. Trying them out
    takes half a second, so the last tokenizers' are kept.

    Raises:
        ConfigError: the vocabulary has too few.
    """
    for separator, candidates in ((" ", _vocabulary_words(tokenizer)), ("", list(string.ascii_letters))):
        words = _tried(tokenizer, separator, candidates)
        if len(words.texts) >= _FEWEST_WORDS:
            return words
    raise ConfigError(
        f"the tokenizer has fewer than {_FEWEST_WORDS} words or letters that are one token each wherever they stand; "
        "prompts of a known length cannot be made with it: use a dataset that has its own prompts"
    )


def _vocabulary_words(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Plain lower-case words among the tokens, lowest ids (the commonest) first."""
    ids = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    texts = (text.strip() for text in tokenizer.decode_batch([[id_] for id_ in ids]))
    plain = (
        text
        for text in texts
        if 2 <= len(text) <= 12 and text.isascii() and text.isalpha() and text.islower()
    )
    return list(dict.fromkeys(plain))[: 2 * _MOST_WORDS]


def _tried(tokenizer: tokenizers.Tokenizer, separator: str, candidates: Sequence[str]) -> Words:
    """Those of `candidates` that were one token each, in several random orders."""
    first, later = {}, {}
    rows = [separator.join([word] * 3) for word in candidates]
    for word, encoding in zip(
        candidates, tokenizer.encode_batch_fast(rows, add_special_tokens=False), strict=True
    ):
        if len(encoding.ids) == 3 and encoding.ids[1] == encoding.ids[2]:
            first[word], later[word] = encoding.ids[0], encoding.ids[1]
    texts = list(first)[:_MOST_WORDS]
    rng = np.random.default_rng(0)
    for _ in range(_ROUNDS):
        order = [texts[number] for number in rng.permutation(len(texts))]
        groups = [order[start : start + _ROW] for start in range(0, len(order), _ROW)]
        encodings = tokenizer.encode_batch_fast(
            [separator.join(group) for group in groups], add_special_tokens=False
        )
        good: set[str] = set()
        for group, encoding in zip(groups, encodings, strict=True):
            if encoding.ids == [first[group[0]], *(later[word] for word in group[1:])]:
                good.update(group)
        texts = [word for word in texts if word in good]
    return Words(
        separator,
        tuple(texts),
        np.array([first[word] for word in texts], dtype=np.int64),
        np.array([later[word] for word in texts], dtype=np.int64),
    )


def _specials(tokenizer: tokenizers.Tokenizer, word: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer puts before and behind a text of its own accord."""
    plain, whole = (tokenizer.encode(word, add_special_tokens=special).ids for special in (False, True))
    start = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), None)
    if start is None:
        raise ConfigError(
            "the tokenizer changes a text beside its special tokens; no prompts can be made with it"
        )
    return tuple(whole[:start]), tuple(whole[start + len(plain) :])


def _without(pieces: Sequence[Piece], num_tokens: int) -> list[Piece]:
    """`pieces` with so many tokens fewer, the first ones first."""
    kept: list[Piece] = []
    for piece in pieces:
        taken = min(num_tokens, piece.num_tokens)
        num_tokens -= taken
        if piece.num_tokens > taken:
            kept.append(Piece(piece.key, piece.num_tokens - taken))
    return kept


def _batches(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """`numbers` in batches, until they have as many tokens as are to be checked."""
    left = _CHECKED_TOKENS
    for start in range(0, len(numbers), _TRIED_PROMPTS_PER_BATCH):
        if left <= 0:
            return
        batch = list(numbers[start : start + _TRIED_PROMPTS_PER_BATCH])
        left -= sum(lengths[number] for number in batch)
        yield batch
