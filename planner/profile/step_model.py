"""The parts of a step's time, as fitted. Pure, and quick: simulators ask for each step."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from twinpool.planner.profile.saved import StepFit
from twinpool.planner.step_shape import StepShape


class Parts(NamedTuple):
    """Seconds of a step alone, by what neighbours slow down apart: what waits for memory (the products of one token,
    and reading KV), and arithmetic (what more tokens add, and the attention of prompts)."""

    memory_s: float
    arithmetic_s: float


class StepModel:
    """Computes a fit's parts."""

    __slots__ = ("_knots", "_slope_s", "_tiles", "_times", "fit")

    def __init__(self, fit: StepFit) -> None:
        self.fit = fit
        self._knots, self._tiles, self._times = fit.row_knots, fit.row_tiles, fit.rows_s
        self._slope_s = _slope_at_end(fit.row_knots, fit.rows_s)

    def parts(self, shape: StepShape) -> Parts:
        """Of one step; one of nothing takes what one token takes."""
        num_sequences, context, num_chunks, prompt_tokens, pairs, prompt_context = shape
        fit, weights_s = self.fit, self._times[0]
        products_s = self._products_s(num_sequences + prompt_tokens) - weights_s
        both_s = fit.both_s + fit.beside_sequence_s * num_sequences if num_sequences and num_chunks else 0.0
        return Parts(
            weights_s + fit.context_token_s * context + fit.prompt_context_token_s * prompt_context,
            products_s
            + fit.sequence_s * num_sequences
            + fit.chunk_s * num_chunks
            + fit.prompt_pair_s * pairs
            + both_s,
        )

    def _products_s(self, rows: int) -> float:
        knots, times = self._knots, self._times
        if rows >= knots[-1]:
            return times[-1] + self._slope_s * (rows - knots[-1])
        if rows <= 1:
            return times[0]
        after = bisect_left(knots, rows)
        rows = whole_tiles(rows, self._tiles[after], knots[after])
        low, high = knots[after - 1], knots[after]
        between = times[after - 1] + (times[after] - times[after - 1]) * (rows - low) / (high - low)
        return min(between, times[after])  # rounding must not lift it beyond the knot


def whole_tiles(rows: int, tile: int, knot: int) -> int:
    """As many rows as their tiles have, but no more than the knot after them."""
    return min(-(-rows // tile) * tile, knot)


def _slope_at_end(knots: tuple[int, ...], times: tuple[float, ...]) -> float:
    """Seconds per row beyond the last knot: as over its upper half, as one short segment may be noise."""
    first = min(bisect_left(knots, knots[-1] / 2), len(knots) - 2)
    return (times[-1] - times[first]) / (knots[-1] - knots[first])
