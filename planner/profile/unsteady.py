"""Service times of an unsteady machine: each step as far from the model's as steps were when it was profiled.

On a machine that is shared with others a step takes now this, now that, and percentiles of latencies tell of it. Which
step meets which factor is drawn by the step's shape and a seed: a pure function, so a simulation stays the same each
time. Not for planning: times are no longer such that more never takes less.
"""

from __future__ import annotations

import random

from twinpool.planner.profile.fit import LEAST_PROMPT
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Unsteadiness
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads


class UnsteadyTimes:
    """The times of a profile, with its unsteadiness, or another one."""

    def __init__(self, steady: FittedTimes, seed: int, unsteadiness: Unsteadiness | None = None) -> None:
        self._steady = steady
        self._seed = seed
        self._factors = unsteadiness or steady.profile.unsteadiness

    @property
    def name(self) -> str:
        """As the steady one's, and that it is not."""
        return f"{self._steady.name}, unsteady"

    @property
    def overheads(self) -> Overheads:
        """As the steady one's."""
        return self._steady.overheads

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        """The steady one's, times a factor of this shape."""
        factors = self._factors.prompt if shape.prompt_tokens >= LEAST_PROMPT else self._factors.decode
        drawn = random.Random(f"{self._seed} {tuple(shape)}").random()
        return self._steady.step_s(shape, num_busy) * factors[int(drawn * len(factors))]

    def transfer_s(self, num_bytes: int) -> float:
        """As the steady one's."""
        return self._steady.transfer_s(num_bytes)
