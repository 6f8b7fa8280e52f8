"""Service times of an unsteady machine: each step as far from the model's as steps were when it was profiled.

On a machine that is shared with others a step takes now this, now that, and percentiles of latencies tell of it. Which
step meets which factor is drawn in the order in which steps are asked for: the same simulation with the same seed is
the same each time. Not for planning: times are no longer such that more never takes less.
"""

from __future__ import annotations

import random

from twinpool.planner.profile.fit import LEAST_PROMPT
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Unsteadiness
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads

NUM_RUNNING = 4
"""So many shapes, those asked for last, may be steps that still run, and are asked for again when a neighbour begins or
ends: such a step keeps its factor. The same shape later is another step."""


class UnsteadyTimes:
    """The times of a profile, with its unsteadiness, or another one. For one simulation."""

    def __init__(self, steady: FittedTimes, seed: int, unsteadiness: Unsteadiness | None = None) -> None:
        self._steady = steady
        self._random = random.Random(seed)
        self._factors = unsteadiness or steady.profile.unsteadiness
        self._running: dict[StepShape, float] = {}

    @property
    def name(self) -> str:
        """As the steady one's, and that it is not."""
        return f"{self._steady.name}, unsteady"

    @property
    def overheads(self) -> Overheads:
        """As the steady one's."""
        return self._steady.overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        """The steady one's, times a factor of this step."""
        factor = self._running.pop(shape, None)
        if factor is None:
            factors = self._factors.prompt if shape.prompt_tokens >= LEAST_PROMPT else self._factors.decode
            factor = self._random.choice(factors)
        self._running[shape] = factor
        if len(self._running) > NUM_RUNNING:
            del self._running[next(iter(self._running))]
        return self._steady.step_s(shape, num_busy) * factor

    def transfer_s(self, num_bytes: int) -> float:
        """As the steady one's."""
        return self._steady.transfer_s(num_bytes)
