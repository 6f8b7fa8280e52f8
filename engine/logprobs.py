"""Log probabilities of tokens, from logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from twinpool.bounds import LEAST_LOGPROB
from twinpool.request import TokenLogprobs


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of each row's softmax: float32 [rows, vocab] → the same, in new memory, from LEAST_LOGPROB
    to 0. Of a row that has no softmax, for it is not of numbers, all are LEAST_LOGPROB."""
    return torch.log_softmax(logits, -1).nan_to_num_(nan=LEAST_LOGPROB).clamp_(LEAST_LOGPROB, 0.0)


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
    most = min(most, table.shape[1])
    # `topk` takes any of those that equal the last: all that reach its value are looked at.
    border = table.topk(most).values[:, -1:]
    reaching = (table >= border).nonzero()
    values = table[reaching[:, 0], reaching[:, 1]].cpu().numpy()
    rows, token_ids = reaching.T.cpu().numpy()
    order = np.lexsort((token_ids, -values, rows))
    first = np.searchsorted(rows, np.arange(len(table)))
    found = []
    for start in first.tolist():
        places = order[start : start + most]
        found.append(list(zip(token_ids[places].tolist(), values[places].tolist(), strict=True)))
    return found
