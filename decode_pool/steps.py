"""Which sequences a model step uses, or may: the one that runs, and the one planned ahead that may have begun since."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.errors import InvariantViolation
from twinpool.request import RequestKey
from twinpool.worker.core import PlanAhead, StepDone, StepPlan


class StepsUnderWay:
    """The steps of one worker, as its core knows them.

    The step thread begins a plan ahead by itself, and the core learns of it with the `StepDone` of the step before. So
    until then each sequence of each plan ahead that was given out counts as in use.
    """

    def __init__(self) -> None:
        self._running: StepPlan | None = None
        self._in_use: set[RequestKey] = set()
        self._ahead: PlanAhead | None = None
        self._is_ahead_current = False

    def __contains__(self, key: RequestKey) -> bool:
        """Whether a step may be reading or writing the blocks of this sequence."""
        return key in self._in_use

    @property
    def is_running(self) -> bool:
        """Whether a step runs."""
        return self._running is not None

    def require_none(self) -> None:
        """Raises InvariantViolation if a step runs."""
        if self._running is not None:
            raise InvariantViolation("a step was asked for while one runs")

    def begin(self, plan: StepPlan) -> StepPlan:
        """`plan` runs from now on."""
        self._follow(plan)
        return plan

    def end(self, done: StepDone) -> None:
        """A step has ended, and what came after it has begun."""
        self._follow(done.following)

    def changed(self) -> None:
        """A sequence has come or is to go: the plan ahead is to be made again."""
        self._is_ahead_current = False

    def plan_ahead(self, make: Callable[[StepPlan], PlanAhead | None]) -> PlanAhead | None:
        """What `make` plans after the running step; it is asked once per step, and again after each change."""
        if self._running is not None and not self._is_ahead_current:
            self._is_ahead_current = True
            self._ahead = make(self._running)
            if self._ahead is not None:
                self._in_use.update(self._ahead.keys)
        return self._ahead

    def _follow(self, plan: StepPlan | None) -> None:
        self._running = plan
        self._in_use = {chunk.key for chunk in plan.batch.slices} if plan else set()
        self._ahead, self._is_ahead_current = None, False
