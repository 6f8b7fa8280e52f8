"""A simulated worker that pays for what happens in a step, not for each of its sequences, and skips quiet steps.

All tokens of a simulation are one, so a step changes nothing but counts, unless somebody comes, ends or has no room, or
a colocated worker computes a prompt. `walk_in_lockstep` keeps those counts, and what clients see of them comes in runs
(`events.EmitRun`). Steps that will change nothing else are not on the agenda: their ends are computed ahead, and
whoever looks at the worker, or tells it something, makes it `settle` those that have passed. The run is the same to the
last bit as step by step, where each sequence has a slice and each token a message: tests say so.

Workers that share cores skip likewise. What stretches their steps is how many others compute, so while nobody begins to
compute or rests, ends are computed ahead as of a worker alone; when somebody does, those that have not come are
computed anew (`go_on`).
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import Any

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.config import Role
from twinpool.decode_pool.core import DecodeCore
from twinpool.decode_pool.lockstep import LockstepLoad
from twinpool.errors import InvariantViolation
from twinpool.messages import LockstepTokens
from twinpool.planner.simulator.worker import TOKEN_ID, SimulatedWorker
from twinpool.planner.step_shape import StepShape
from twinpool.worker.core import Event, SendCoordinator

QUIET_STEP = LockstepTokens((), (), TOKEN_ID)
"""What is told of a step in which each sequence got a token and nothing else happened."""
MOST_SKIPPED, MOST_SKIPPED_ON = 8, 64
"""Steps whose ends are computed at once: what comes meanwhile makes those behind it worthless. More where as many as
that have passed without anything."""


class LockstepWorker(SimulatedWorker):
    """As `SimulatedWorker`, of a decode worker that is no hybrid or a colocated one.

    At each of the times in `untold` the coordinator would have heard, with a message, of a step of so many sequences
    that was skipped, or that nobody waits to hear of. Before `due_at` there is none that is neither settled nor told.
    What the coordinator knows of untold steps, where it matters, is that they filled `num_foreseen` slots, which
    changes at `foreseen_until` at the earliest. While it must not `may_skip`, every step is on the agenda.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if not isinstance(self.core, DecodeCore | ColocatedCore):
            raise InvariantViolation(f"{self.worker_id} is no worker that can go in lockstep")
        self._decode = self.core
        self._decode.walk_in_lockstep(TOKEN_ID)
        self.may_skip = True
        self.untold: list[tuple[float, int, LockstepTokens]] = []
        self.due_at = self.foreseen_until = inf
        self.num_foreseen = 0
        self._untold_foreseen = self._ends_foreseen = 0
        self._ends_at: list[float] = []
        self._present = 0
        """The place in `_ends_at` of the step that runs."""
        self._num_ended = 0
        """Sequences of the step that ended last."""
        self._expected = -1
        """That of the one whose end is on the agenda; below 0 while none is."""
        self._num_busy = 0
        """Others that compute on the same cores."""

    def take(self, event: Event) -> None:
        """The core hears of `event` now."""
        self.settle(self._agenda.now)
        super().take(event)

    def settle(self, now: float) -> None:
        """Skips the steps that have ended until `now`."""
        ends_at, first = self._ends_at, self._present
        if first >= self._expected or ends_at[first] > now:
            return
        place = bisect_right(ends_at, now, first, self._expected)
        seconds = []
        num_sequences, control_s, began_at = self._shape.num_sequences, self.control_s, self._began_at
        for end_at in ends_at[first:place]:
            seconds.append(end_at - began_at)
            self.busy_s += end_at - began_at
            began_at = end_at
            self.untold.append((end_at + control_s, num_sequences, QUIET_STEP))
        self._began_at = began_at
        self.num_steps += len(seconds)
        self._untold_foreseen += max(0, min(place, self._ends_foreseen) - first)
        self._present = place
        self._decode.skip_steps(seconds)
        self.note_due()

    def note_due(self) -> None:
        """Something was told, or settled."""
        if self.untold:
            self.due_at = self.untold[0][0]
        else:
            self.due_at = self._ends_at[self._present] if self._present < self._expected else inf
        self.foreseen_until = min(self.foreseen_until, self.due_at)

    def foresee(self, now: float, *, with_now: bool) -> int:
        """How many slots more than foreseen before are filled by steps that the coordinator would know at `now`, those
        that it would hear of at that very moment among them or not."""
        untold, ends_at, control_s = self.untold, self._ends_at, self.control_s
        place, num_more = self._untold_foreseen, 0
        while place < len(untold) and (untold[place][0] < now or (with_now and untold[place][0] == now)):
            num_more += untold[place][1]
            place += 1
        self._untold_foreseen = place
        next_at = untold[place][0] if place < len(untold) else None
        if next_at is None:
            first = place = max(self._ends_foreseen, self._present)
            while place < self._expected:
                told_at = ends_at[place] + control_s
                if told_at > now or (told_at == now and not with_now):
                    break
                place += 1
            num_more += (place - first) * self._shape.num_sequences
            self._ends_foreseen = place
            next_at = ends_at[place] + control_s if place < self._expected else inf
        self.foreseen_until = next_at
        self.num_foreseen += num_more
        return num_more

    def take_untold(self, now: float, *, with_now: bool) -> list[tuple[float, LockstepTokens]]:
        """Takes what was to be told until `now` from `untold`: the coordinator hears of those steps. Nothing is
        foreseen then, as it is told before."""
        untold = self.untold
        place = 0
        while place < len(untold) and (untold[place][0] < now or (with_now and untold[place][0] == now)):
            place += 1
        taken = [(at_s, message) for at_s, _, message in untold[:place]]
        del untold[:place]
        self.num_foreseen = self._untold_foreseen = 0
        self._ends_foreseen = self._present
        self.note_due()
        return taken

    def skip_no_more(self) -> None:
        """From now on each step is on the agenda, until it may skip again."""
        self.settle(self._agenda.now)
        self.may_skip = False
        if self._is_stepping:
            self._expect()

    def go_on(self, num_busy: int) -> None:
        """See `SimulatedWorker`. Of a step that begins, no end is on the agenda before the next one is planned.

        One that is to end at this very moment has ended, whether or not it comes after what brings the change: less is
        left of it than the time's last digit, so stretched it ends now, too.
        """
        is_new = self._expected < 0
        if not is_new:
            self.settle(self._agenda.now)
            self._begin_ends_anew()
        self._num_busy = num_busy
        self._ends_at = [self._end_beside(num_busy)]
        if not is_new:
            self._expect()

    def _begin_ends_anew(self) -> None:
        """The step that runs, at its own pace since it began, is the first one whose end is known."""
        if number := self._present:
            num_sequences, context, *_ = self._shape
            self._shape = StepShape(num_sequences, context + number * num_sequences)
            self._has_slept = False
            self._moved_at, self._share_done = self._began_at, 0.0
            self._whole_s = self._step_s(self._num_busy)
        self._ends_foreseen = max(0, self._ends_foreseen - number)
        self._present, self._expected = 0, -1

    def _go_on_working(self) -> None:
        if not self._is_stepping:
            if (load := self._decode.begin_step(self._agenda.now)) is not None:
                self._start(self._load_shape(load))
            self._do(self._decode.flush())
        if self._is_stepping:
            self._decode.plan_step_ahead()
            self._expect()

    def _expect(self, most: int = MOST_SKIPPED) -> None:
        """Puts the end of the first step that is not quiet, or of the one behind so many, on the agenda."""
        place = self._present + (self._decode.num_quiet_steps(most) if self.may_skip else 0)
        if place != self._expected:
            ends_at, (num_sequences, context, *_) = self._ends_at, self._shape
            for number in range(len(ends_at), place + 1):
                shape = StepShape(num_sequences, context + number * num_sequences)
                ends_at.append(ends_at[-1] + self._times.step_s(shape, self._num_busy))
            self._expected = place
            self._version += 1
            self._agenda.at(ends_at[place], self.number, self._end_step, self._version)
        self.note_due()

    def _end_step(self, version: int) -> None:
        if version == self._version:
            self.settle(self._agenda.now)
            if self.may_skip and self._decode.num_quiet_steps(1):
                self._expect(MOST_SKIPPED_ON)  # this one is quiet, too: only no further ones were computed
                return
        super()._end_step(version)

    def _send_coordinator(self, command: SendCoordinator) -> None:
        message = command.message
        if self.may_skip and isinstance(message, LockstepTokens) and self._can_wait(message):
            self.untold.append((self._agenda.now + self.control_s, self._num_ended, message))
            self.note_due()
        else:
            super()._send_coordinator(command)

    def _can_wait(self, message: LockstepTokens) -> bool:
        """Whether nobody can take a request because of it, or do anything else that he could not before."""
        if message.left or (message.tokens and self.pool.role is not Role.DECODE):
            return False
        return all(token.finish is None for token in message.tokens)

    def _step_ended(self, seconds: float) -> None:
        self._present, self._expected, self._ends_foreseen = 0, -1, 0
        self._num_ended = self._shape.num_sequences
        commands, following = self._decode.end_step(seconds, self._agenda.now)
        if following is not None:
            self._start(self._load_shape(following))
        self._do(commands)
        self._go_on_working()

    def _load_shape(self, load: LockstepLoad) -> StepShape:
        if not load.chunks:
            return StepShape(load.num_sequences, load.num_tokens)
        return StepShape(load.num_sequences, load.num_tokens, *self._shape_of(load.chunks)[2:])
