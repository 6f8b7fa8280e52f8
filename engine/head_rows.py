"""The tokens of a step that the model's head is for: those that another is sampled after, and those that are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from twinpool.engine.batch import Scoring, SequenceSlice
from twinpool.engine.logprobs import log_probabilities, rows_of, told
from twinpool.request import RequestKey, TokenLogprobs

ROWS_AT_ONCE = 64
"""Whose logits are there together where tokens are scored: a prompt of any length takes no more memory than that. (A
model that runs through transformers gives all of a chunk's at once.)"""
Scores = dict[RequestKey, tuple[TokenLogprobs, ...]]


class HeadRows:
    """`rows`: where among a step's packed tokens they are, int64, ascending."""

    def __init__(self, slices: Sequence[SequenceSlice]) -> None:
        """A slice's scored tokens are its first ones; if it is sampled from, the row of its last token is there too."""
        self._scored = [piece for piece in slices if piece.scoring is not None]
        ends = np.cumsum([len(piece.token_ids) for piece in slices])
        self.rows: np.ndarray[Any, np.dtype[np.int64]]
        if not self._scored:
            sampled = [place for place, piece in enumerate(slices) if piece.sampling is not None]
            self.rows = ends[sampled] - 1 if sampled else np.empty(0, np.int64)
            return
        rows: list[int] = []
        self._sampled: list[int] = []
        self._targets: dict[int, tuple[int, int]] = {}
        for piece, end in zip(slices, ends.tolist(), strict=True):
            scoring, first = piece.scoring or Scoring((), 0), end - len(piece.token_ids)
            for place, follower in enumerate(scoring.followers):
                self._targets[len(rows)] = follower, scoring.num_top
                rows.append(first + place)
            if piece.sampling is not None:
                if len(scoring.followers) < len(piece.token_ids):
                    rows.append(end - 1)
                self._sampled.append(len(rows) - 1)
        self.rows = np.array(rows, np.int64)

    def finish(
        self, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor | None, Scores]:
        """From what the model gave for `rows`: the logits to sample from, float32 [sampled slices, vocab], None if no
        slice is; and of each slice with `scoring` the log probabilities of its followers."""
        if not self._scored:
            return (logits_of(hidden) if len(self.rows) else None), {}
        sampled: list[torch.Tensor] = []
        entries: list[TokenLogprobs] = []
        for first in range(0, len(self.rows), ROWS_AT_ONCE):
            logits = logits_of(hidden[first : first + ROWS_AT_ONCE])
            here = range(first, first + len(logits))
            if own := [row - first for row in self._sampled if row in here]:
                sampled.append(logits[own])
            if scored := [row for row in here if row in self._targets]:
                table = log_probabilities(rows_of(logits, [row - first for row in scored]))
                followers, nums_top = zip(*(self._targets[row] for row in scored), strict=True)
                entries += told(table, followers, nums_top)
        scores: Scores = {}
        for piece in self._scored:
            count = len(piece.scoring.followers) if piece.scoring is not None else 0
            scores[piece.key] = tuple(entries[:count])
            del entries[:count]
        return (torch.cat(sampled) if sampled else None), scores
