"""The next token of every row of a batch: penalties and bans, then `kernels/sampling.py`, row by row in the reference;
in one compiled call on a CPU (`kernels/sampling_cpu.py`) and at once on a GPU.

Penalties: a logit x of a token that occurs in the prompt or the output becomes x / r if it is positive, else x · r
(Keskar et al. 2019, arXiv:1909.05858); then, if it occurs c times in the output, x - c · frequency - presence (OpenAI's
API reference). 1, 0 and 0 leave all as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from twinpool.kernels.jit import flat, runs_compiled
from twinpool.kernels.sampling import sample_reference
from twinpool.kernels.sampling_cpu import choose_rows

ROW = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),
        ("first_mark", "<i4"),
        ("end_mark", "<i4"),
        ("unused", "<i4"),
        ("seed", "<u8"),
        ("position", "<u8"),
    ]
)
"""How a row is sampled: its parameters, 0 for greedy, as `kernels/sampling.py` has them; its penalties; and where its
marks are."""
BANNED = -1
"""The mark of a token that must not be chosen."""


def marks_of(
    prompt: Iterable[int], output: Iterable[int], banned: Iterable[int]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """What penalties and bans need to know of a row: int32 [marks, 2] of token ids, each once, and for each twice its
    number in the output, plus 1 if it is in the prompt; or `BANNED`."""
    marks = {token: 2 * times for token, times in Counter(output).items()}
    for token in set(prompt):
        marks[token] = marks.get(token, 0) + 1
    marks.update(dict.fromkeys(banned, BANNED))
    return np.array(list(marks.items()), np.int32).reshape(-1, 2)


def adjust_reference(
    logits: torch.Tensor, marks: torch.Tensor, repetition: float, presence: float, frequency: float
) -> torch.Tensor:
    """The row's logits, float32 [vocab], after penalties and bans. Marks of tokens beyond the vocabulary are void."""
    token, seen = marks[marks[:, 0] < len(logits)].long().unbind(-1)
    x, times = logits[token], seen // 2
    x = torch.where(x > 0, x / repetition, x * repetition) - times * frequency - (times > 0) * presence
    return logits.index_copy(0, token, x.masked_fill(seen == BANNED, float("-inf")))


def sample_rows_reference(
    logits: torch.Tensor, rows: np.ndarray[Any, Any], marks: torch.Tensor
) -> torch.Tensor:
    """As `sample_rows`, but `rows` are `ROW`s."""
    tokens = []
    for x, row in zip(logits.float(), rows, strict=True):
        mine = marks[row["first_mark"] : row["end_mark"]]
        x = adjust_reference(x, mine, *(float(row[name]) for name in ("repetition", "presence", "frequency")))
        if row["temperature"] > 0:
            shape = [
                row[name].item() for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")
            ]
            tokens.append(sample_reference(x, *shape))
        else:
            tokens.append(int(x.argmax()))
    return torch.tensor(tokens)


def sample_rows(
    logits: torch.Tensor, rows: np.ndarray[Any, Any], marks: np.ndarray[Any, np.dtype[np.int32]]
) -> torch.Tensor:
    """The token of each row, int64 [rows], on the device of `logits` [rows, vocab], which change where there are marks.

    `rows` are `ROW`s; row r has marks[first_mark:end_mark], as `marks_of` gives them. On a GPU nothing is waited for.
    """
    if runs_compiled(logits) and logits.dtype is torch.float32 and logits.stride(1) == 1:
        token_ids = np.empty(len(rows), np.int64)
        choose_rows(flat(logits), logits.stride(0), logits.shape[1], rows, marks, token_ids)
        return torch.from_numpy(token_ids)
    if not logits.is_cuda:
        return sample_rows_reference(logits, rows, torch.from_numpy(marks))
    from twinpool.kernels.gpu import sampling as gpu

    words = np.concatenate((rows.view(np.int32), marks.reshape(-1)))
    on_device = torch.from_numpy(words).pin_memory().to(logits.device, non_blocking=True)
    size = rows.nbytes // 4
    return gpu.sample_rows(logits, on_device[:size], on_device[size:] if len(marks) else None)
