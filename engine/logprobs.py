"""Log probabilities of tokens, from logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from twinpool.bounds import LEAST_LOGPROB
from twinpool.request import TokenLogprobs

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
_TILE = 64
"""Tokens whose highest is found first. Vocabularies mostly are whole multiples."""


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of each row's softmax: float32 [rows, vocab] → the same, in new memory, from LEAST_LOGPROB
    to 0. Of a row that has no softmax, for it is not of numbers, all are LEAST_LOGPROB."""
    table = torch.log_softmax(logits, -1).clamp_(min=LEAST_LOGPROB)  # each sum has a 1: none is above 0
    broken = table[:, 0].isnan()  # all of a row, or none
    if bool(broken.any()):
        table[broken] = LEAST_LOGPROB
    return table


def rows_of(logits: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """The rows at `places`, which ascend; copied only if they are not all."""
    return logits if len(places) == len(logits) else logits[list(places)]


def told(table: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row of `table`, log probabilities [rows, vocab]: that of its token and so many of the likeliest.

    All come from the table, so a token that is among the likeliest has the same number twice, to the bit.
    """
    chosen = table[torch.arange(len(table)), torch.tensor(token_ids)].tolist()
    likeliest = _likeliest(table, max(num_top, default=0))
    return [
        TokenLogprobs(logprob, tuple(top[:num]))
        for logprob, top, num in zip(chosen, likeliest, num_top, strict=True)
    ]


def _likeliest(table: torch.Tensor, most: int) -> list[list[tuple[int, float]]]:
    """Each row's `most` likeliest tokens in falling order, of equal ones the lowest id first."""
    if not most or not len(table):
        return [[] for _ in range(len(table))]
    rows, token_ids, values = _candidates(table, most)
    order = np.lexsort((token_ids, -values, rows))
    found = []
    for start in np.searchsorted(rows, np.arange(len(table))).tolist():
        end = min(start + most, int(np.searchsorted(rows, rows[start], "right")))
        places = order[start:end]
        found.append(list(zip(token_ids[places].tolist(), values[places].tolist(), strict=True)))
    return found


def _candidates(table: torch.Tensor, most: int) -> tuple[Ints, Ints, Floats]:
    """Rows, ascending, tokens and values of all that reach a border which at least `most` of each row do, or all.

    The `most` highest tiles have as many tokens from the lowest of their highest on. A sort of the whole row, or a
    `topk` that also leaves open which of equal ones it takes, costs ten times as much.
    """
    if rest := -table.shape[1] % _TILE:
        table = F.pad(table, (0, rest), value=float("-inf"))
    tiles = table.view(len(table), -1, _TILE)
    highest = tiles.amax(-1)
    border = table.new_full((len(table), 1), LEAST_LOGPROB)
    if most <= highest.shape[1]:
        border = highest.topk(most).values[:, -1:]
    tile_rows, tile_places = (highest >= border).nonzero().T
    found = tiles[tile_rows, tile_places]
    which, place = (found >= border[tile_rows]).nonzero().T
    token_ids = tile_places[which] * _TILE + place
    return tile_rows[which].cpu().numpy(), token_ids.cpu().numpy(), found[which, place].cpu().numpy()
