"""From output tokens to the text that the client gets: pure, one object per request.

Text leaves as soon as no stop string can reach back into it. Whatever way the tokens are split over outputs,
the pieces add up to the same text, the same tokens and the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twinpool.coordinator.service import Output
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.engine.stop_strings import StopMatcher
from twinpool.errors import InvariantViolation, RequestFailed
from twinpool.request import FinishReason


class Piece(NamedTuple):
    """The next part of an answer: tokens, and the text that became final with them (perhaps none).

    `num_tokens` counts the answer's tokens so far, these included. The last piece has `finish`.
    `at_stop_string`: a stop string ended the answer, which nobody but this class can know: tokens that follow do not
    count, and workers that still run must be stopped.
    """

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    finish: FinishReason | None = None
    at_stop_string: bool = False


class Answer:
    """Turns the outputs of one request into pieces of text, without stop string, EOS and special tokens.

    A stop string is looked for in the text after the first `min_tokens` tokens.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def add(self, output: Output) -> Piece:
        """The piece that `output` adds.

        Raises:
            RequestError: the output says that the request was lost.
            InvariantViolation: the output does not follow the one before.
        """
        if output.first_index != self._num_tokens:
            raise InvariantViolation(f"output token {output.first_index} follows {self._num_tokens} tokens")
        finish = output.finish
        if finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
            raise output.error or RequestFailed(f"the request ended without an answer: {finish}")
        token_ids = output.token_ids
        # The token that stops an answer (EOS, a stop token) counts, but is no text.
        text_ids = token_ids[:-1] if finish is FinishReason.STOP else token_ids
        if self._matcher is not None:
            return self._add_matching(self._matcher, token_ids, text_ids, finish)
        self._num_tokens += len(token_ids)
        text = self._detokenizer.add(text_ids)
        if finish is not None:
            text += self._detokenizer.finish()
        return Piece(text, token_ids, self._num_tokens, finish)

    def _add_matching(
        self,
        matcher: StopMatcher,
        token_ids: tuple[int, ...],
        text_ids: tuple[int, ...],
        finish: FinishReason | None,
    ) -> Piece:
        # One token at a time: the token that completes a stop string is the last that counts.
        text = ""
        before = self._num_tokens
        for used, token_id in enumerate(text_ids, start=1):
            new = self._detokenizer.add((token_id,))
            if before + used <= self._min_tokens:
                text += new
                continue
            text += matcher.add(new)
            if matcher.matched is not None:
                self._num_tokens = before + used
                return Piece(text, token_ids[:used], self._num_tokens, FinishReason.STOP, at_stop_string=True)
        self._num_tokens = before + len(token_ids)
        if finish is None:
            return Piece(text, token_ids, self._num_tokens)
        text += matcher.add(self._detokenizer.finish())
        is_matched = matcher.matched is not None
        return Piece(
            text + matcher.finish(),
            token_ids,
            self._num_tokens,
            FinishReason.STOP if is_matched else finish,
            at_stop_string=is_matched,
        )
