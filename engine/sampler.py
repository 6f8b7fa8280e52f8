"""From logits to the next token of each sequence. A token depends on its own logits, parameters, seed, position and,
where its parameters look back, on the tokens before it.

Where the parameters ask for it, a row's logits change in this order: the bias is added; what the grammar, or the list
of allowed tokens, does not allow becomes -inf; penalties; what is banned becomes -inf. Log probabilities are of the
logits before all that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.engine.logprobs import log_probabilities, rows_of, told
from twinpool.engine.past import MarkRows, Matcher, MatcherOf, Past, past_of
from twinpool.errors import ConfigError
from twinpool.kernels.batch_sampling import ROW, marks_of, sample_rows
from twinpool.request import Job, RequestKey, SamplingParams, TokenLogprobs

_WORD64 = 2**64 - 1
_ADDED_FOR = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)
"""For each byte of a mask what makes -inf of the eight logits whose bits are 0. Several times as fast as filling."""
_NOTHING_LEFT = (
    "no token is left that the answer could go on with: allowed_token_ids, bad_words and what else is asked for "
    "leave none"
)
_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class Chosen(NamedTuple):
    """The token after each slice, the log probabilities of those that are to come with them, and the sequences that
    cannot go on, with the reason: their tokens mean nothing."""

    token_ids: list[int]
    logprobs: dict[RequestKey, TokenLogprobs]
    failed: dict[RequestKey, str]


def choose_tokens(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> list[int]:
    """The token after each slice. `logits` float32 [len(slices), vocab] is changed: banned tokens get -inf.

    Every slice has `sampling`. At temperature 0 the largest logit wins; of equal ones the lowest id. The whole batch is
    sampled at once; on a GPU the host waits once, for the tokens.
    """
    return StepSampling(slices).choose(logits).token_ids


class _Choosing(NamedTuple):
    """A row that not every token may follow, and those that may not."""

    past: Past
    banned: Sequence[int]


def no_grammars(job: Job) -> Matcher:
    """The `MatcherOf` of those who have none."""
    raise ConfigError(f"nothing here matches the grammar of {job.key}")


class StepSampling:
    """How the tokens after a step's slices are chosen, all that does not take their logits: made while, or before, the
    model runs.

    `rows` and `marks` are what `sample_rows` takes. They alone say how, unless logits are changed otherwise too.
    """

    def __init__(self, slices: Sequence[SequenceSlice], matcher_of: MatcherOf = no_grammars) -> None:
        """Takes the slices' tokens into their pasts. Every slice has `sampling`.

        Raises:
            InvariantViolation: a sequence's tokens have a gap.
        """
        self._slices = slices
        self._choosing: dict[int, _Choosing] = {}
        self._biased: list[int] = []
        self._told: list[int] = []
        rows: list[tuple[float, ...]] = []
        marks: list[MarkRows] = [np.empty((0, 2), np.int32)]
        end = 0
        for place, piece in enumerate(slices):
            first, params = end, piece.sampling or _GREEDY
            if piece.look_back is not None or piece.banned_token_ids:
                marks.append(self._marks_of(place, piece, matcher_of))
                end += len(marks[-1])
            if params.logit_bias:
                self._biased.append(place)
            if params.logprobs is not None:
                self._told.append(place)
            filters = (params.temperature, params.top_p, params.min_p)
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            rows.append((*filters, *penalties, params.top_k, first, end, 0, params.seed & _WORD64, piece.end))
        self.rows, self.marks = np.array(rows, ROW), np.concatenate(marks)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are sampled from other logits than the model's."""
        return bool(len(self.marks) or self._biased or self._choosing)

    def choose(self, logits: torch.Tensor, token_ids: torch.Tensor | None = None) -> Chosen:
        """The tokens of the slices' `logits`, float32 [len(slices), vocab], which change if `changes_logits`;
        `token_ids` if they were sampled by `rows` already. On a GPU the host waits once, for the tokens, and again only
        for log probabilities."""
        told_of = [self._slices[place] for place in self._told]
        table = log_probabilities(rows_of(logits, self._told)) if told_of else None
        failed: dict[RequestKey, str] = {}
        if self.changes_logits or token_ids is None:
            if self._biased:
                self._add_biases(logits)
            if self._choosing:
                failed = self._keep_to_what_may_follow(logits)
            token_ids = sample_rows(logits, self.rows, self.marks)
        chosen: list[int] = token_ids.tolist()
        logprobs: dict[RequestKey, TokenLogprobs] = {}
        if table is not None:
            nums = [piece.sampling.logprobs or 0 for piece in told_of if piece.sampling is not None]
            entries = told(table, [chosen[place] for place in self._told], nums)
            logprobs = {piece.key: entry for piece, entry in zip(told_of, entries, strict=True)}
        return Chosen(chosen, logprobs, failed)

    def _marks_of(self, place: int, piece: SequenceSlice, matcher_of: MatcherOf) -> MarkRows:
        """Of a slice whose sequence looks back, or that has bans."""
        if piece.look_back is None:
            return marks_of((), (), piece.banned_token_ids)
        past = past_of(piece.look_back, matcher_of)
        past.take(piece.token_ids, piece.start)
        banned = (*piece.banned_token_ids, *past.next_banned())
        if past.chooses:
            self._choosing[place] = _Choosing(past, banned)
        return past.marks.rows(banned)

    def _add_biases(self, logits: torch.Tensor) -> None:
        biases = [
            (place, token_id, bias)
            for place in self._biased
            if (sampling := self._slices[place].sampling) is not None
            for token_id, bias in sampling.logit_bias
            if token_id < logits.shape[1]
        ]
        if biases:
            where = _upload(np.array([biased[:2] for biased in biases]).T, logits).unbind()
            added = _upload(np.array([bias for _, _, bias in biases], np.float32), logits)
            logits.index_put_(where, added, accumulate=True)

    def _keep_to_what_may_follow(self, logits: torch.Tensor) -> dict[RequestKey, str]:
        """Makes -inf of what grammars and lists do not allow; returns who cannot go on, and why."""
        failed: dict[RequestKey, str] = {}
        vocab_size = logits.shape[1]
        for place, (past, banned) in self._choosing.items():
            mask = past.mask(vocab_size)
            if past.error or not past.leaves_some(mask, banned, vocab_size):
                failed[self._slices[place].key] = past.error or _NOTHING_LEFT
            elif mask is not None:
                added = _ADDED_FOR.take(mask.view(np.uint8), axis=0).reshape(-1)[:vocab_size]
                logits[place].add_(_upload(added, logits))
        return failed


def _upload(array: np.ndarray[Any, Any], like: torch.Tensor) -> torch.Tensor:
    """On the device of `like`; the host waits for nothing."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor
