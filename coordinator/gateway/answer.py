"""From output tokens to the text that the client gets: pure, one object per choice.

Text leaves as soon as no stop string can reach back into it. Whatever way the tokens are split over outputs,
the pieces add up to the same text, the same tokens and the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from twinpool.coordinator.service import Output
from twinpool.engine.detokenizer import IncrementalDetokenizer
from twinpool.engine.stop_strings import StopMatcher
from twinpool.errors import InvariantViolation, RequestFailed
from twinpool.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What of a choice's tokens its client is to see.

    A stop string is looked for in the text after the first `min_tokens` tokens. With `includes_stop` what stopped the
    answer, a string or a token, is part of its text. `has_logprobs` and `has_prompt_logprobs`: the outputs have log
    probabilities, and the client gets them. `shows_tokens`: it gets token ids. `is_prompt_only`: the one token that the
    workers make is not for the client.
    """

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    includes_stop: bool = False
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    shows_tokens: bool = False
    is_prompt_only: bool = False


class Piece(NamedTuple):
    """The next part of an answer: text that became final, perhaps none, and the tokens that came with it.

    `num_tokens` counts the answer's tokens so far, these included. The last piece has `finish`, and a `stop_reason` if
    a stop string or one of the request's stop tokens ended the answer. Where the client gets tokens or log
    probabilities, those of tokens without text come with the next text, or the end; `logprobs[i]` and `text_offsets[i]`
    (characters of the answer's text before the token's) are of `token_ids[i]`. The first piece has `prompt_logprobs`,
    if they are asked for: entry i is of prompt token i + 1.
    """

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def at_stop_string(self) -> bool:
        """Whether a stop string ended the answer, which nobody but `Answer` can know: tokens that follow do not count,
        and workers that still run must be stopped."""
        return isinstance(self.stop_reason, str)


class Answer:
    """Turns the outputs of one choice into pieces of text, without stop string, EOS and special tokens (of these as the
    detokenizer has it)."""

    def __init__(self, detokenizer: IncrementalDetokenizer, rules: AnswerRules) -> None:
        self._detokenizer = detokenizer
        self._rules = rules
        self._matcher = StopMatcher(rules.stop) if rules.stop else None
        self._is_plain = rules == AnswerRules(
            min_tokens=rules.min_tokens, stop_token_ids=rules.stop_token_ids
        )
        self._goes_one_by_one = self._matcher is not None or rules.has_logprobs
        self._holds_tokens = rules.has_logprobs or rules.shows_tokens
        self._held: list[Piece] = []
        self._num_tokens = 0
        self._num_chars = 0
        self._lacks_prompt_logprobs = rules.has_prompt_logprobs

    def add(self, output: Output) -> Piece:
        """The piece that `output` adds.

        Raises:
            RequestError: the output says that the request was lost.
            InvariantViolation: the output does not follow the one before, or lacks log probabilities.
        """
        if output.first_index != self._num_tokens:
            raise InvariantViolation(f"output token {output.first_index} follows {self._num_tokens} tokens")
        finish = output.finish
        if finish is None and self._is_plain:
            self._num_tokens += len(output.token_ids)
            return Piece(self._detokenizer.add(output.token_ids), output.token_ids, self._num_tokens)
        if finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
            raise output.error or RequestFailed(f"the request ended without an answer: {finish}")
        token_ids = output.token_ids
        # The token that stops an answer (EOS, a stop token) counts, but is no text unless the client wants it.
        is_stop_text = finish is not FinishReason.STOP or self._rules.includes_stop
        text_ids = token_ids if is_stop_text else token_ids[:-1]
        if self._goes_one_by_one:
            piece = self._add_one_by_one(output, text_ids)
        else:
            self._num_tokens += len(token_ids)
            text = self._detokenizer.add(text_ids)
            if finish is not None:
                text += self._detokenizer.finish()
            piece = Piece(text, token_ids, self._num_tokens, finish, self._stop_token(output))
        if self._lacks_prompt_logprobs and token_ids:
            piece = self._with_prompt_logprobs(piece, output)
        if self._rules.is_prompt_only:
            finish = None if piece.finish is None else FinishReason.LENGTH
            return Piece("", (), 0, finish, prompt_logprobs=piece.prompt_logprobs)
        return self._with_held(piece) if self._holds_tokens else piece

    def _add_one_by_one(self, output: Output, text_ids: tuple[int, ...]) -> Piece:
        # The token that completes a stop string is the last that counts, and each token has its place in the text.
        matcher, rules, finish = self._matcher, self._rules, output.finish
        text = ""
        offsets: list[int] = []
        before = self._num_tokens
        stop_string: str | None = None
        for used, token_id in enumerate(text_ids, start=1):
            offsets.append(self._num_chars)
            new = self._detokenizer.add((token_id,))
            self._num_chars += len(new)
            if matcher is None or before + used <= rules.min_tokens:
                text += new
                continue
            text += matcher.add(new)
            if (stop_string := matcher.matched) is not None:
                break
        num_used = len(offsets) if stop_string is not None else len(output.token_ids)
        self._num_tokens = before + num_used
        if finish is not None and stop_string is None:
            rest = self._detokenizer.finish()
            self._num_chars += len(rest)
            text += rest if matcher is None else matcher.add(rest)
            if matcher is not None:
                stop_string = matcher.matched
                text += matcher.finish()
        if stop_string is not None:
            text += stop_string if rules.includes_stop else ""
            finish = FinishReason.STOP
        offsets += [self._num_chars] * (num_used - len(offsets))
        return Piece(
            text,
            output.token_ids[:num_used],
            self._num_tokens,
            finish,
            self._stop_token(output) if stop_string is None else stop_string,
            self._logprobs_of(output, num_used),
            tuple(offsets),
        )

    def _stop_token(self, output: Output) -> int | None:
        if output.finish is not FinishReason.STOP or not output.token_ids:
            return None
        last = output.token_ids[-1]
        return last if last in self._rules.stop_token_ids else None

    def _logprobs_of(self, output: Output, num_used: int) -> tuple[TokenLogprobs, ...]:
        if not self._rules.has_logprobs:
            return ()
        if len(output.logprobs) != len(output.token_ids):
            found = f"{len(output.logprobs)} log probabilities came with {len(output.token_ids)} tokens"
            raise InvariantViolation(found)
        return output.logprobs[:num_used]

    def _with_prompt_logprobs(self, piece: Piece, output: Output) -> Piece:
        self._lacks_prompt_logprobs = False
        if output.prompt_logprobs is None:
            raise InvariantViolation("the first output token came without the prompt's log probabilities")
        return piece._replace(prompt_logprobs=output.prompt_logprobs)

    def _with_held(self, piece: Piece) -> Piece:
        """The piece with the tokens held back so far; while there is no text, its own are held back too."""
        if not piece.text and piece.finish is None:
            self._held.append(piece)
            return Piece("", (), piece.num_tokens, prompt_logprobs=piece.prompt_logprobs)
        if not self._held:
            return piece
        held, self._held = [*self._held, piece], []
        return piece._replace(
            token_ids=tuple(chain.from_iterable(part.token_ids for part in held)),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in held)),
            text_offsets=tuple(chain.from_iterable(part.text_offsets for part in held)),
        )
