"""Whether a worker gets on with its work, on its own clock."""

from __future__ import annotations

MOST_BETWEEN_LOOKS_S = 1.0
"""If a look comes later than this after the one before, the process itself stood still (frozen, or starved of its
core). The time beyond this is no fault of the step, and is not counted."""


class Progress:
    """How long nothing has moved although something should.

    Nothing moves while a step does not end, or while work waits for room and no step, transfer or grant ends. Work that
    waits for another worker alone (for KV to come, for a grant) is no standstill of this one. `look` must be called at
    least every `MOST_BETWEEN_LOOKS_S`, or time goes uncounted.
    """

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._step_s: float | None = None
        self._waiting_s = 0.0

    def step_began(self) -> None:
        """The step thread has got a step."""
        self._step_s = 0.0

    def step_ended(self) -> None:
        """The step has run."""
        self._step_s = None
        self.moved()

    def moved(self) -> None:
        """Something ended that others may have waited for."""
        self._waiting_s = 0.0

    def look(self, now: float, is_anything_waiting: bool) -> None:
        """Counts the time since the last look."""
        passed_s = min(now - self._looked_at, MOST_BETWEEN_LOOKS_S)
        self._looked_at = now
        if self._step_s is not None:
            self._step_s += passed_s
        self._waiting_s = self._waiting_s + passed_s if is_anything_waiting else 0.0

    @property
    def step_s(self) -> float:
        """How long the present step has been running; 0 if none is."""
        return self._step_s or 0.0

    @property
    def stalled_s(self) -> float:
        """How long nothing has moved that should; small while all is well."""
        return max(self.step_s, self._waiting_s)
