"""From logits to the next token of each sequence. A token depends on its own logits, parameters, seed and position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.kernels.batch_sampling import ROW, marks_of, sample_rows
from twinpool.kernels.sampling import sample

_WORD64 = 2**64 - 1


def choose_tokens(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> list[int]:
    """The token after each slice. `logits` float32 [len(slices), vocab] is changed: banned tokens get -inf.

    Every slice has `sampling`. At temperature 0 the largest logit wins; of equal ones the lowest id. On a GPU the whole
    batch is sampled at once, and the host waits once, for the tokens.
    """
    if logits.is_cuda:
        chosen: list[int] = sample_rows(logits, *sampling_rows(slices)).tolist()
        return chosen
    vocab_size = logits.shape[1]
    for row, piece in enumerate(slices):
        if banned := [token for token in piece.banned_token_ids if token < vocab_size]:
            logits[row, banned] = float("-inf")
    tokens = greedy(logits)
    for row, piece in enumerate(slices):
        params = piece.sampling
        if params is not None and params.temperature > 0:
            tokens[row] = sample(
                logits[row],
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                params.seed,
                piece.end,
            )
    return tokens


def greedy(logits: torch.Tensor) -> list[int]:
    """The lowest id among the largest logits of each row, in main memory."""
    chosen: list[int] = logits.numpy().argmax(axis=1).tolist()
    return chosen


def sampling_rows(
    slices: Sequence[SequenceSlice],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, np.dtype[np.int32]]]:
    """What `sample_rows` takes besides the logits: `ROW`s and marks."""
    marks = [marks_of((), (), piece.banned_token_ids) for piece in slices]
    ends = np.cumsum([len(mine) for mine in marks])
    rows = np.zeros(len(slices), ROW)
    rows["repetition"] = 1.0
    rows["first_mark"][1:], rows["end_mark"] = ends[:-1], ends
    for row, piece in zip(rows, slices, strict=True):
        if (params := piece.sampling) is not None:
            row["temperature"], row["top_p"], row["min_p"] = params.temperature, params.top_p, params.min_p
            row["top_k"], row["seed"], row["position"] = params.top_k, params.seed & _WORD64, piece.end
    return rows, np.concatenate(marks)
