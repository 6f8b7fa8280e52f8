"""Of which TP degrees a plan's workers are: those that were asked for, or the smallest that hold the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinpool.errors import ConfigError
from twinpool.planner.plan.layouts import WorkerKind
from twinpool.planner.times.floor import refuse_faster_times

DEGREES = (1, 2, 4, 8)
"""Tried where nobody asked for others."""
_MOST_DEGREES = 3


def kinds_of(
    degrees: Sequence[int] | None, budget: int, kind: Callable[[int], WorkerKind]
) -> dict[int, WorkerKind]:
    """Workers of each of the `degrees`, by degree; None: of the smallest that `budget` accelerators make and that hold
    the model. `kind` makes one, and raises ConfigError if it does not.

    Raises:
        ConfigError: the model fits on none of them, or not on one that was asked for.
        AboveRoofline: service times are faster than the hardware.
    """
    if degrees is not None:
        return {degree: _checked(kind(degree)) for degree in degrees}
    kinds: dict[int, WorkerKind] = {}
    why: ConfigError | None = None
    for degree in (each for each in DEGREES if each <= budget):
        try:
            made = kind(degree)
        except ConfigError as exc:
            why = exc
        else:
            kinds[degree] = _checked(made)
        if len(kinds) == _MOST_DEGREES:
            break
    if not kinds:
        raise why or ConfigError(f"--budget is {budget}; allowed: 1 or more accelerators")
    return kinds


def _checked(kind: WorkerKind) -> WorkerKind:
    if kind.floor is not None:
        refuse_faster_times(kind.times, kind.floor)
    return kind
