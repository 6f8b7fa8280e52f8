"""From logits to the next token of each sequence. A token depends on its own logits, parameters, seed and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinpool.engine.batch import SequenceSlice
from twinpool.kernels.sampling import sample


def choose_tokens(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> list[int]:
    """The token after each slice. `logits` float32 [len(slices), vocab] is changed: banned tokens get -inf.

    Every slice has `sampling`. At temperature 0 the largest logit wins; of equal ones the lowest id.
    """
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
    """The lowest id among the largest logits of each row."""
    if logits.device.type == "cpu":
        chosen: list[int] = logits.numpy().argmax(axis=1).tolist()
        return chosen
    highest = logits == logits.amax(dim=1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    lowest: list[int] = torch.where(highest, ids, logits.shape[1]).amin(dim=1).tolist()
    return lowest
