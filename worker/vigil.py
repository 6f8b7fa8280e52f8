"""When a worker process must end by itself."""

from __future__ import annotations

from twinpool.errors import NotAMember, StepStuck, TwinpoolError, WorkerDenied
from twinpool.worker.links import TURNED_AWAY

MOST_REFUSALS = 8
"""A worker gives up when so many attempts to connect in a row were broken off; it makes one about every 0.4 s."""


class Vigil:
    """Judges what is seen of the connection to the coordinator, at `address`, and of the model step that runs."""

    def __init__(self, address: str, step_timeout_s: float) -> None:
        self._address = address
        self._step_timeout_s = step_timeout_s
        self._num_broken_at_welcome: int | None = None

    def welcomed(self, num_broken: int) -> None:
        """The coordinator has let this worker in, after `num_broken` breaks of the connection."""
        self._num_broken_at_welcome = num_broken

    def verdict(self, num_refused: int, num_broken: int, step_s: float) -> TwinpoolError | None:
        """Why the process must end, or None.

        `num_refused` attempts to connect in a row were broken off, the connection has broken `num_broken` times in all,
        and the present step has run for `step_s` seconds.
        """
        if num_refused >= MOST_REFUSALS:
            return WorkerDenied(f"the coordinator at {self._address} {TURNED_AWAY}")
        if self._num_broken_at_welcome is not None and num_broken > self._num_broken_at_welcome:
            # It may miss a job, a grant or a Cancel now, and the coordinator a token; neither would ever know.
            return NotAMember("the connection to the coordinator broke, and what was on it is lost")
        return self.stuck() if step_s > self._step_timeout_s else None

    def stuck(self) -> StepStuck:
        """A step, or the end of one, has been waited for as long as may be."""
        return StepStuck(
            f"a model step has not ended for {self._step_timeout_s:g} s; this process ends. If steps of this model "
            "may take so long, raise --step-timeout"
        )
