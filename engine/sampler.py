"""From logits to the next token of each sequence. A token depends on its own logits, parameters, seed and position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.kernels.batch_sampling import ROW, marks_of, sample_rows
from twinpool.request import SamplingParams

_WORD64 = 2**64 - 1
_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_NO_PENALTY = (1.0, 0.0, 0.0)
"""Repetition, presence, frequency."""


def choose_tokens(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> list[int]:
    """The token after each slice. `logits` float32 [len(slices), vocab] is changed: banned tokens get -inf.

    Every slice has `sampling`. At temperature 0 the largest logit wins; of equal ones the lowest id. The whole batch is
    sampled at once; on a GPU the host waits once, for the tokens.
    """
    chosen: list[int] = sample_rows(logits, *sampling_rows(slices)).tolist()
    return chosen


def sampling_rows(
    slices: Sequence[SequenceSlice],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, np.dtype[np.int32]]]:
    """What `sample_rows` takes besides the logits: `ROW`s and marks."""
    rows: list[tuple[float, ...]] = []
    marks: list[np.ndarray[Any, np.dtype[np.int32]]] = [np.empty((0, 2), np.int32)]
    end = 0
    for piece in slices:
        first = end
        if piece.banned_token_ids:
            marks.append(marks_of((), (), piece.banned_token_ids))
            end += len(marks[-1])
        params = piece.sampling or _GREEDY
        shape = (params.temperature, params.top_p, params.min_p, *_NO_PENALTY, params.top_k)
        rows.append((*shape, first, end, 0, params.seed & _WORD64, piece.end))
    return np.array(rows, ROW), np.concatenate(marks)
