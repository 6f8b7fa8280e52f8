"""Shapes whose lengths, times and shared beginnings are distributed as in public traces, without those files.

`fitted.json` has what `fit.py` took from them: tables of quantiles of the lengths, requests per bin of time, the shape
of the gaps between arrivals and, where prompts continue earlier ones, how often, how far and how soon. Lengths of
prompt and output are drawn independently of each other, as their rank correlation in the traces is below 0.08.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from twinpool.bench.serving.datasets.settings import DatasetName
from twinpool.bench.serving.datasets.shapes import Shape, hashed, own

TABLES = Path(__file__).with_name("fitted.json")
LEVELS = np.concatenate([np.linspace(0, 0.99, 100), [0.995, 0.999, 1.0]])
"""What share of the values lies at or below each entry of a table."""
_SYSTEM_PROMPT = 0
"""The hash id that every prompt begins with where prompts continue earlier ones."""


class Arrivals(msgspec.Struct, frozen=True):
    """Requests per bin of `bin_s` seconds, one bin after the other and then from the first one again. Within, gaps are
    gamma-distributed with `gap_shape` after division by the local mean gap: 1 is a Poisson process, less is burstier.
    """

    bin_s: float
    requests: tuple[int, ...]
    gap_shape: float


class Continued(msgspec.Struct, frozen=True):
    """Prompts that continue an earlier one beyond the first block: their share of all, and tables of their lengths, of
    the share of their blocks that they have in common with it, and of the seconds since it came."""

    share: float
    block_size: int
    input_tokens: tuple[float, ...]
    common_share: tuple[float, ...]
    age_s: tuple[float, ...]


class FittedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one trace. `input_tokens` of one with `continued` are those of prompts that continue none."""

    source: str
    licence: str
    num_requests: int
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]
    arrivals: Arrivals
    continued: Continued | None = None


@cache
def fitted_traces() -> dict[DatasetName, FittedTrace]:
    """All that were fitted, by the name of the dataset."""
    return msgspec.json.decode(TABLES.read_bytes(), type=dict[DatasetName, FittedTrace])


def fitted_shapes(trace: FittedTrace, num_prompts: int, seed: int, start_s: float = 0.0) -> list[Shape]:
    """So many requests as they would come from `start_s` of the trace's time on. Times rise, and count from the trace's
    start."""
    rng = np.random.default_rng(seed)
    times = arrival_times(trace.arrivals, num_prompts, rng, start_s)
    outputs = _whole(_drawn(trace.output_tokens, num_prompts, rng)).tolist()
    if trace.continued is not None:
        return _conversations(trace, trace.continued, times, outputs, rng)
    inputs = _whole(_drawn(trace.input_tokens, num_prompts, rng)).tolist()
    return [
        Shape((own(index, input_tokens),), output_tokens, at_s)
        for index, (input_tokens, output_tokens, at_s) in enumerate(
            zip(inputs, outputs, times.tolist(), strict=True)
        )
    ]


def arrival_times(
    arrivals: Arrivals, size: int, rng: np.random.Generator, start_s: float = 0.0
) -> NDArray[np.float64]:
    """So many rising times after `start_s`, in seconds: a renewal process at rate 1 on an axis that counts expected
    requests, carried over to time by the cumulated rate."""
    expected = np.concatenate([[0.0], np.cumsum(arrivals.requests, dtype=np.float64)])
    edges = arrivals.bin_s * np.arange(len(expected))
    round_s, round_requests = float(edges[-1]), float(expected[-1])
    rounds, within_s = divmod(start_s, round_s)
    begin = rounds * round_requests + np.interp(within_s, edges, expected)
    shape = arrivals.gap_shape
    at = begin + np.cumsum(rng.gamma(shape, 1 / shape, size=size))
    rounds_done, within = np.divmod(at, round_requests)
    offsets: NDArray[np.float64] = rounds_done * round_s + np.interp(within, expected, edges)
    return offsets


def _conversations(
    trace: FittedTrace,
    continued: Continued,
    times: NDArray[np.float64],
    outputs: list[int],
    rng: np.random.Generator,
) -> list[Shape]:
    """Each prompt that continues one has its first blocks in common with the one that came as long before it as the
    tables say, or nearest to that among those that are long enough."""
    size = len(times)
    continues = rng.random(size) < continued.share
    inputs = _whole(
        np.where(continues, _drawn(continued.input_tokens, size, rng), _drawn(trace.input_tokens, size, rng))
    )
    blocks = -(-inputs // continued.block_size)
    common = np.minimum(np.rint(_drawn(continued.common_share, size, rng) * blocks).astype(np.int64), blocks)
    wanted = times - _drawn(continued.age_s, size, rng)
    ids: list[tuple[int, ...]] = []
    fresh = count(_SYSTEM_PROMPT + 1)
    for index in range(size):
        first: tuple[int, ...] = (_SYSTEM_PROMPT,)
        if continues[index] and common[index] > 1:
            able = np.flatnonzero(blocks[:index] >= common[index])
            if len(able):
                nearest = int(able[np.abs(times[able] - wanted[index]).argmin()])
                first = ids[nearest][: common[index]]
        ids.append((*first, *(next(fresh) for _ in range(int(blocks[index]) - len(first)))))
    return [
        Shape(hashed(ids_, input_tokens, continued.block_size), output_tokens, at_s, hash_ids=ids_)
        for ids_, input_tokens, output_tokens, at_s in zip(
            ids, inputs.tolist(), outputs, times.tolist(), strict=True
        )
    ]


def _drawn(table: tuple[float, ...], size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    return np.interp(rng.random(size), LEVELS, table)


def _whole(lengths: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(1, np.rint(lengths)).astype(np.int64)
