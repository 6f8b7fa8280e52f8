"""The latency model of a worker, fitted to measured steps and transfers. Pure.

A step is a sum of parts, each with a physical meaning (`saved.StepFit`), with coefficients that are not negative: so
times never fall when a step has more to do. Each shape counts by its relative error.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from twinpool.bench.serving.distributions import percentile
from twinpool.planner.profile.nnls import Floats, nnls
from twinpool.planner.profile.saved import (
    Residuals,
    SlowDown,
    StepFit,
    StepSample,
    TransferFit,
    TransferSample,
    Unsteadiness,
)
from twinpool.planner.profile.step_model import StepModel, whole_tiles
from twinpool.planner.step_shape import StepShape

_REWEIGHTINGS = 4
_TILES = (16, 32)
_SHARED_FROM = (64, 128, 256)
"""Rows from which on threads may share them: each then has tiles of its own."""
FAR_OFF_MEDIAN, FAR_OFF_P90, FAR_OFF_WORST = 0.1, 0.25, 0.5
"""Residuals beyond one of these make a fit one that must not be trusted unsaid."""
LEAST_PROMPT = 32
"""Tokens of prompts from which on a step is one of arithmetic more than of reading weights."""
NUM_FACTORS = 40


def fit_steps(samples: Sequence[StepSample], row_knots: Sequence[int]) -> StepFit:
    """The model of steps that ran alone. `row_knots` rise from 1; samples that are held out are not used. Tiles are
    those that leave the least relative errors."""
    used = [each for each in samples if not (each.is_held_out or each.num_busy or each.has_slept)]
    return min(
        (_fitted(used, row_knots, tiles) for tiles in _tilings(row_knots)), key=lambda found: found[0]
    )[1]


def _tilings(knots: Sequence[int]) -> list[tuple[int, ...]]:
    """What the tiles between knots may be: none, or of one size, which may double at a knot, where threads begin to
    share rows in place of columns."""

    def fitting(tile: int, low: int, high: int) -> int:
        return tile if low % tile == 0 and high - low >= tile else 1

    found = [(1,) * len(knots)]
    for tile in _TILES:
        for doubled_from in (*_SHARED_FROM, knots[-1]):
            sizes = [2 * tile if low >= doubled_from else tile for low in knots[:-1]]
            found.append((1, *map(fitting, sizes, knots[:-1], knots[1:])))
    return list(dict.fromkeys(found))


def _fitted(
    used: Sequence[StepSample], row_knots: Sequence[int], tiles: tuple[int, ...]
) -> tuple[float, StepFit]:
    """The sum of the squares of relative errors, and the model, with such tiles."""
    seconds = np.array([sample.seconds for sample in used])
    columns = np.array([_columns(StepShape(*sample.shape), row_knots, tiles) for sample in used])
    # Errors relative to what was measured would count what is too fast by chance the most; so, then, relative to what
    # is predicted.
    scale, found = seconds, np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        found = nnls(columns / scale[:, None], seconds / scale)
        scale = np.maximum(columns @ found, seconds.min() / 10)
    rises, rest = found[: len(row_knots)], found[len(row_knots) :]
    fit = StepFit(
        row_knots=tuple(row_knots),
        row_tiles=tiles,
        rows_s=tuple(np.maximum.accumulate(np.cumsum(rises)).tolist()),
        sequence_s=float(rest[0]),
        chunk_s=float(rest[1]),
        context_token_s=float(rest[2]),
        prompt_pair_s=float(rest[3]),
        prompt_context_token_s=float(rest[4]),
        both_s=float(rest[5]),
        beside_sequence_s=float(rest[6]),
    )
    return float(np.square(columns @ found / seconds - 1).sum()), fit


def _columns(shape: StepShape, knots: Sequence[int], tiles: Sequence[int]) -> list[float]:
    """How far a step is into each segment between knots (beyond the last one: as the last segment goes on), then what
    else it counts."""
    rows = max(1, shape.num_sequences + shape.prompt_tokens)
    if 1 < rows < knots[-1]:
        after = bisect_left(knots, rows)
        rows = whole_tiles(rows, tiles[after], knots[after])
    segments = [1.0]
    for low, high in itertools.pairwise(knots):
        share = (rows - low) / (high - low)
        segments.append(max(0.0, share if high == knots[-1] else min(1.0, share)))
    has_both = shape.num_sequences > 0 and shape.num_chunks > 0
    others = (
        shape.num_sequences,
        shape.num_chunks,
        shape.context_tokens,
        shape.prompt_pairs,
        shape.prompt_context,
        has_both,
        has_both * shape.num_sequences,
    )
    return [*segments, *map(float, others)]


def fit_slow_down(fit: StepFit, samples: Sequence[StepSample]) -> SlowDown | None:
    """By what each part grows beside busy neighbours; None without such samples. How much longer a shape takes is
    counted from the same shape alone right before, so neither an error of the fit nor a slower moment counts."""
    busy = [
        (sample, sample.before_s)
        for sample in samples
        if sample.num_busy and sample.before_s and not (sample.is_held_out or sample.has_slept)
    ]
    if not busy:
        return None
    model = StepModel(fit)
    shares, growth = [], []
    for sample, before_s in busy:
        parts = model.parts(StepShape(*sample.shape))
        shares.append([part / sum(parts) * sample.num_busy for part in parts])
        growth.append(sample.seconds / before_s - 1)
    return SlowDown(*map(float, nnls(np.array(shares), np.array(growth))))


def wake_s_of(samples: Sequence[StepSample]) -> tuple[float, float]:
    """What a step takes longer after its worker had nothing to do: alone, and for each busy neighbour more. The medians
    over shapes, each from the same shape right before, among the same neighbours."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        if sample.has_slept and sample.before_s is not None:
            found.setdefault(sample.num_busy, []).append(sample.seconds - sample.before_s)
    alone_s = max(0.0, statistics.median(found.get(0, [0.0])))
    busy_s = statistics.median(found.get(1, [alone_s]))
    return alone_s, max(0.0, busy_s - alone_s)


def unsteadiness_of(samples: Sequence[StepSample]) -> Unsteadiness:
    """How far single steps alone were from the middle of their shape: what of it the machine does, not the model."""
    found = factors_of([each for each in samples if not (each.num_busy or each.has_slept)])
    return Unsteadiness(_with_mean_one(found.decode), _with_mean_one(found.prompt))


def factors_of(samples: Sequence[StepSample]) -> Unsteadiness:
    """As many equally likely factors as are told, or none, by which single steps took longer than `seconds`."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for sample in samples:
        if sample.seconds > 0:
            has_prompt = StepShape(*sample.shape).prompt_tokens >= LEAST_PROMPT
            found[has_prompt] += [each / sample.seconds for each in sample.each_s]
    return Unsteadiness(_quantiles(found[False]), _quantiles(found[True]))


def _quantiles(ratios: Sequence[float]) -> tuple[float, ...]:
    if not ratios:
        return ()
    places = (np.arange(NUM_FACTORS) + 0.5) / NUM_FACTORS
    found: list[float] = np.quantile(ratios, places, method="inverted_cdf").tolist()
    return tuple(found)


def _with_mean_one(factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(each / statistics.fmean(factors) for each in factors) or (1.0,)


def fit_transfers(samples: Sequence[TransferSample]) -> tuple[TransferFit, ...]:
    """A line for each transport, in the order in which they come."""
    fits = []
    for transport in dict.fromkeys(sample.transport for sample in samples):
        used = [sample for sample in samples if sample.transport == transport]
        seconds = np.array([sample.seconds for sample in used])
        columns: Floats = np.array([[1.0, float(sample.num_bytes)] for sample in used])
        start_s, byte_s = nnls(columns / seconds[:, None], np.ones(len(used))).tolist()
        fits.append(TransferFit(transport, start_s, byte_s))
    return tuple(fits)


def residuals_of(
    samples: Sequence[StepSample],
    transfers: Sequence[TransferSample],
    predict_s: Callable[[StepSample], float],
    transfer_s: Callable[[TransferSample], float],
) -> tuple[Residuals, ...]:
    """How far the model is off, by part; shapes that it has not seen, and those beside neighbours, are parts of their
    own."""
    points: dict[str, list[tuple[float, str]]] = {}
    for sample in samples:
        part = sample.part
        if sample.num_busy:
            part += ", beside a neighbour"
        if sample.has_slept:
            part = "after a sleep" + (", beside a neighbour" if sample.num_busy else "")
        if sample.is_held_out:
            part = "shapes not fitted"
        points.setdefault(part, []).append((predict_s(sample) / sample.seconds - 1, sample.name))
    for transfer in transfers:
        found = transfer_s(transfer) / transfer.seconds - 1
        name = f"{transfer.num_bytes / 1e6:.1f} MB"
        points.setdefault(f"transfer by {transfer.transport}", []).append((found, name))
    return tuple(_residuals(part, found) for part, found in points.items())


def _residuals(part: str, points: Sequence[tuple[float, str]]) -> Residuals:
    sizes = sorted(abs(error) for error, _ in points)
    worst = max(points, key=lambda point: abs(point[0]))
    return Residuals(
        part=part,
        num_points=len(points),
        median=statistics.median(sizes),
        p90=percentile(sizes, 90),
        worst=sizes[-1],
        bias=statistics.median(error for error, _ in points),
        worst_case=worst[1],
    )


def far_off(residuals: Iterable[Residuals]) -> list[str]:
    """A sentence for each part in which the model is so far off that it must be said."""
    return [
        f"{each.part}: the fitted times are off by {each.median:.0%} at the median, {each.worst:.0%} at worst "
        f"({each.worst_case})"
        for each in residuals
        if each.median > FAR_OFF_MEDIAN or each.p90 > FAR_OFF_P90 or each.worst > FAR_OFF_WORST
    ]
