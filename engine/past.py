"""What a `LookBack` holds on the step thread: the marks of the tokens so far, where the answer is in its grammar, and
which tokens would complete what must not occur.

All of it is a function of the job and of the tokens that follow it, and grows by a token at a time: a sequence that
goes on elsewhere begins with its job's tokens there, and takes in the others as they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from twinpool.engine.bad_words import BadWords
from twinpool.engine.look_back import LookBack
from twinpool.errors import InvariantViolation, TwinpoolError
from twinpool.kernels.batch_sampling import BANNED, marks_of
from twinpool.request import Job

MarkRows = np.ndarray[Any, np.dtype[np.int32]]
"""int32 [marks, 2], as `marks_of` gives them."""
Mask = np.ndarray[Any, np.dtype[np.int32]]
"""A bit for each token, the lowest of each word first: int32 [words]."""
_IN_OUTPUT = 2
"""What one more occurrence in the output adds to a mark."""


class Matcher(Protocol):
    """Where one answer is in its grammar."""

    @property
    def error(self) -> str:
        """Why it cannot go on, in a sentence; empty while it can."""
        ...

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token."""
        ...

    def mask(self) -> Mask:
        """Which tokens may follow. It may find an error, and it is one if none may: nobody else looks for that."""
        ...


MatcherOf = Callable[[Job], Matcher]
"""Gives a new matcher at the beginning of the job's grammar; raises a TwinpoolError if there is no such grammar."""


class Marks:
    """The marks of a growing sequence: as `marks_of` would make them anew, but each token costs the same however many
    there were before."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self._rows = marks_of(prompt, output, ())
        self._size = len(self._rows)
        self._places: dict[int, int] = {token: place for place, token in enumerate(self._rows[:, 0].tolist())}

    def add(self, token_id: int) -> None:
        """The output goes on with `token_id`."""
        place = self._places.get(token_id)
        if place is None:
            place = self._size
            if place == len(self._rows):
                self._rows = np.concatenate((self._rows, np.empty((max(64, place), 2), np.int32)))
            self._rows[place] = token_id, 0
            self._places[token_id] = place
            self._size += 1
        self._rows[place, 1] += _IN_OUTPUT

    def rows(self, banned: Sequence[int] = ()) -> MarkRows:
        """One for each token, those of `banned` as `BANNED`. Valid until the next `add`, and not to be changed."""
        rows = self._rows[: self._size]
        if not banned:
            return rows
        new = [token for token in dict.fromkeys(banned) if token not in self._places]
        rows = np.concatenate((rows, np.array([(token, BANNED) for token in new], np.int32).reshape(-1, 2)))
        rows[[self._places[token] for token in banned if token in self._places], 1] = BANNED
        return rows


class Past:
    """One sequence's past: that of the job's tokens, and of each token that ran after them, once.

    `marks` are those of its tokens if the job has penalties, else none. `matcher` is there if it has a grammar, and
    nothing is wrong with that. `chooses` says whether a token may be none that can follow: then ask for `mask` and
    `leaves_some` before one is sampled.
    """

    def __init__(self, job: Job, matcher_of: MatcherOf) -> None:
        self._key = job.key
        self._num_seen = len(job.token_ids)
        sampling, output = job.sampling, job.token_ids[job.num_prompt :]
        self._counts = sampling.has_penalties
        # Only the repetition penalty asks for the prompt.
        prompt = job.token_ids[: job.num_prompt] if sampling.repetition_penalty != 1 else ()
        self.marks = Marks(prompt, output) if self._counts else Marks((), ())
        self._bad_words = BadWords(sampling.bad_words, output) if sampling.bad_words else None
        self._allowed_token_ids = sampling.allowed_token_ids
        self._allowed: Mask | None = None
        self.matcher: Matcher | None = None
        self._refusal = ""
        if sampling.grammar is None:
            return
        try:
            self.matcher = matcher_of(job)
        except TwinpoolError as exc:
            self._refusal = f"its grammar cannot be followed: {exc}"
            return
        for token_id in output:
            self.matcher.accept(token_id)

    @property
    def error(self) -> str:
        """Why the answer cannot go on, in a sentence; empty while it can."""
        return self._refusal or (self.matcher.error if self.matcher is not None else "")

    @property
    def chooses(self) -> bool:
        """Whether not every token may follow, or there is an error."""
        has_lists = self._bad_words is not None or bool(self._allowed_token_ids)
        return has_lists or self.matcher is not None or bool(self._refusal)

    def take(self, token_ids: Sequence[int], start: int) -> None:
        """These tokens run, at positions `start` and on. Those that were seen before are passed over.

        Raises:
            InvariantViolation: tokens between were never seen.
        """
        if start > self._num_seen:
            raise InvariantViolation(
                f"{self._key} goes on at position {start}; of its tokens {self._num_seen} were seen"
            )
        for token_id in token_ids[self._num_seen - start :]:
            self._num_seen += 1
            if self._counts:
                self.marks.add(token_id)
            if self._bad_words is not None:
                self._bad_words.add(token_id)
            if self.matcher is not None:
                self.matcher.accept(token_id)

    def next_banned(self) -> Sequence[int]:
        """The tokens that would complete what must not occur."""
        return () if self._bad_words is None else self._bad_words.next_banned()

    def mask(self, num_tokens: int) -> Mask | None:
        """Which of the model's `num_tokens` tokens may follow, by the grammar and the list of those that are allowed;
        None if there is neither. It may find an error."""
        by_grammar = None if self.matcher is None else self.matcher.mask()
        if not self._allowed_token_ids:
            return by_grammar
        if self._allowed is None:
            self._allowed = _mask_of(self._allowed_token_ids, num_tokens)
        return self._allowed if by_grammar is None else by_grammar[: len(self._allowed)] & self._allowed

    def leaves_some(self, mask: Mask | None, banned: Sequence[int], num_tokens: int) -> bool:
        """Whether a token may follow, with `mask` and but for the `banned` ones. A matcher has looked after itself."""
        if not banned and not self._allowed_token_ids:
            return True
        may = np.ones(num_tokens, np.bool_)
        if mask is not None:
            may = np.unpackbits(mask.view(np.uint8), bitorder="little")[:num_tokens].view(np.bool_)
        may[[token_id for token_id in banned if token_id < num_tokens]] = False
        return bool(may.any())


def _mask_of(token_ids: Sequence[int], num_tokens: int) -> Mask:
    bits = np.zeros(-(-num_tokens // 32) * 32, np.uint8)
    bits[[token_id for token_id in token_ids if token_id < num_tokens]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def past_of(look_back: LookBack, matcher_of: MatcherOf) -> Past:
    """What `look_back` holds: made of its job at the first call."""
    if look_back.past is None:
        look_back.past = Past(look_back.job, matcher_of)
    if not isinstance(look_back.past, Past):
        raise InvariantViolation(f"{look_back.job.key} has a past of another kind")
    return look_back.past
