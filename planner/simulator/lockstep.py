"""A simulated decode worker that pays for what happens in a step, not for each of its sequences.

All tokens of a simulation are one, so a step changes nothing but counts, unless somebody comes, ends or needs a block.
`DecodeCore.walk_in_lockstep` keeps those counts, and what clients see of them comes in runs (`events.EmitRun`). The run
is the same to the last bit as step by step, where each sequence has a slice and each token a message: tests say so.
"""

from __future__ import annotations

from typing import Any

from twinpool.decode_pool.core import DecodeCore
from twinpool.errors import InvariantViolation
from twinpool.planner.simulator.worker import TOKEN_ID, SimulatedWorker
from twinpool.planner.step_shape import StepShape


class LockstepWorker(SimulatedWorker):
    """As `SimulatedWorker`, of a decode worker that is no hybrid."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if not isinstance(self.core, DecodeCore):
            raise InvariantViolation(f"{self.worker_id} does more than decode: it cannot go in lockstep")
        self._decode = self.core
        self._decode.walk_in_lockstep(TOKEN_ID)

    def _go_on_working(self) -> None:
        if not self._is_stepping:
            if (load := self._decode.begin_step(self._agenda.now)) is not None:
                self._start(StepShape(load.num_sequences, load.num_tokens))
            self._do(self._decode.flush())
        if self._is_stepping:
            self._decode.plan_step_ahead()

    def _step_ended(self, seconds: float) -> None:
        commands, following = self._decode.end_step(seconds, self._agenda.now)
        if following is not None:
            self._start(StepShape(following.num_sequences, following.num_tokens))
        self._do(commands)
        self._go_on_working()
