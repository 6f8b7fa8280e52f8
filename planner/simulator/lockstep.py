"""A simulated worker that pays for what happens in a step, not for each of its sequences, and skips quiet steps.

All tokens of a simulation are one, so a step changes nothing but counts, unless somebody ends or has no room, or a
colocated worker computes a prompt. Who comes takes part from the next step on, and has the first token told by name.
`walk_in_lockstep` keeps those counts, and what clients see of them comes in runs (`events.EmitRun`). Steps that will
change nothing else are not on the agenda: their ends are computed ahead, and whoever looks at the worker, or tells it
something, makes it `settle` those that have passed. The run is the same to the last bit as step by step, where each
sequence has a slice and each token a message: tests say so.

Workers that share cores skip likewise. What stretches their steps is how many others compute, so while nobody begins to
compute or rests, ends are computed ahead as of a worker alone; when somebody does, those that have not come are
computed anew (`go_on`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import inf
from operator import sub
from typing import Any

import msgspec

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.config import Role
from twinpool.decode_pool.core import DecodeCore
from twinpool.decode_pool.lockstep import LockstepLoad
from twinpool.errors import InvariantViolation
from twinpool.messages import LockstepTokens
from twinpool.planner.simulator.machine import Delivered
from twinpool.planner.simulator.worker import TOKEN_ID, SimulatedWorker
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import steps_ahead
from twinpool.worker.core import Event, SendCoordinator

QUIET_STEP = LockstepTokens((), (), TOKEN_ID)
"""What is told of a step in which each sequence got a token and nothing else happened."""
MOST_SKIPPED = 48
"""Steps whose ends are computed at once: who comes meanwhile makes those behind worthless."""


class UntoldSteps(msgspec.Struct, gc=False):
    """Steps of so many sequences each, of each of which the coordinator is to hear `message` at its time; in order."""

    times: list[float]
    num_sequences: int
    message: LockstepTokens

    def goes_on_with(self, num_sequences: int) -> bool:
        """Whether a quiet step of so many sequences can be one more of these."""
        return self.message is QUIET_STEP and self.num_sequences == num_sequences

    def num_until(self, now: float, *, with_now: bool) -> int:
        """How many are to be told before `now`, or at that very moment if those count, too."""
        times = self.times
        if times[-1] < now:
            return len(times)
        return bisect_right(times, now) if with_now else bisect_left(times, now)


class LockstepWorker(SimulatedWorker):
    """As `SimulatedWorker`, of a decode worker that is no hybrid or a colocated one.

    Of the steps in `untold`, in order, the coordinator would have heard already: they were skipped, or nobody waits to
    hear of them. Before `due_at` there is none that is neither settled nor told. What the coordinator knows of untold
    steps, where it matters, is that they filled `num_foreseen` slots, which changes at `foreseen_until` at the
    earliest. While it must not `may_skip`, every step is on the agenda.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if not isinstance(self.core, DecodeCore | ColocatedCore):
            raise InvariantViolation(f"{self.worker_id} is no worker that can go in lockstep")
        self._decode = self.core
        self._decode.walk_in_lockstep(TOKEN_ID)
        self._steps_ahead = steps_ahead(self._times)
        self.may_skip = True
        self.untold: list[UntoldSteps] = []
        self.due_at = self.foreseen_until = inf
        self.num_foreseen = 0
        self._ends_at: list[float] = []
        """Of the step of `_shape`, and of those behind it, the next one of `_shape_behind`."""
        self._shape_behind = StepShape()
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
        ends = ends_at[first:place]
        seconds = list(map(sub, ends, [self._began_at, *ends]))
        busy_s = self.busy_s
        for step_s in seconds:
            busy_s += step_s
        self.busy_s = busy_s
        self._began_at = self._ended_at = ends[-1]
        self._present = place
        times = [end_at + self.control_s for end_at in ends] if self.control_s else ends
        told = self._decode.skip_steps(seconds)
        for number, message in enumerate(told):
            num_sequences = self._num_sequences_at(first + number)
            self._count_ended(1, num_sequences)
            self._keep_untold([times[number]], num_sequences, message if message.tokens else QUIET_STEP)
        if num_more := len(times) - len(told):
            num_sequences = self._num_sequences_at(place - 1)
            self._count_ended(num_more, num_sequences)
            self._keep_untold(times[-num_more:], num_sequences, QUIET_STEP)
        self._note_due()

    def delivered_before(self, now: float) -> Delivered:
        """See `Computing`."""
        self.settle(now)
        return super().delivered_before(now)

    def _keep_untold(self, times: list[float], num_sequences: int, message: LockstepTokens) -> None:
        """Steps that could be told, each at its time."""
        untold = self.untold
        if message is QUIET_STEP and untold and untold[-1].goes_on_with(num_sequences):
            untold[-1].times.extend(times)
        else:
            untold.append(UntoldSteps(times, num_sequences, message))

    def _note_due(self) -> None:
        """Something was told, or settled."""
        if self.untold:
            self.due_at = self.untold[0].times[0]
        else:
            self.due_at = self._ends_at[self._present] if self._present < self._expected else inf
        if self.due_at < self.foreseen_until:
            self.foreseen_until = self.due_at

    def foresee(self, now: float, *, with_now: bool) -> int:
        """How many slots more than foreseen before are filled by steps that the coordinator would know at `now`, those
        that it would hear of at that very moment among them or not."""
        num_slots, next_at = 0, inf
        for steps in self.untold:
            place = steps.num_until(now, with_now=with_now)
            num_slots += place * steps.num_sequences
            if place < len(steps.times):
                next_at = steps.times[place]
                break
        else:
            for place in range(self._present, self._expected):
                told_at = self._ends_at[place] + self.control_s
                if told_at > now or (told_at == now and not with_now):
                    next_at = told_at
                    break
                num_slots += self._num_sequences_at(place)
        num_more = num_slots - self.num_foreseen
        self.num_foreseen, self.foreseen_until = num_slots, next_at
        return num_more

    def take_untold(self, now: float, *, with_now: bool) -> list[UntoldSteps]:
        """Takes what was to be told until `now` from `untold`: the coordinator hears of those steps. Nothing is
        foreseen then, as it is told before."""
        taken, self.untold = self.untold, []
        for number, steps in enumerate(taken):
            place = steps.num_until(now, with_now=with_now)
            if place < len(steps.times):
                taken, self.untold = taken[:number], taken[number:]
                if place:
                    taken.append(UntoldSteps(steps.times[:place], steps.num_sequences, steps.message))
                    del steps.times[:place]
                break
        self.num_foreseen = 0
        self._note_due()
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
            self._begin_anew(self._shape_at(self._present + 1))
        self._num_busy = num_busy
        self._ends_at = [self._end_beside(num_busy)]
        if not is_new:
            self._expect()

    def _begin_anew(self, shape_behind: StepShape) -> None:
        """The step that runs, at its own pace since it began, is the first one whose end is known, and one of
        `shape_behind` follows."""
        if self._present:
            self._shape = self._shape_at(self._present)
            self._has_slept = False
            self._moved_at, self._share_done = self._began_at, 0.0
            if self._machine is not None:  # nobody else changes a step's course
                self._whole_s = self._step_s(self._num_busy)
        self._ends_at = [self._ends_at[self._present]]
        self._shape_behind = shape_behind
        self._present, self._expected = 0, -1

    def _shape_at(self, place: int) -> StepShape:
        """Of the step whose end has that place."""
        return self._shape_behind.after(place - 1) if place else self._shape

    def _num_sequences_at(self, place: int) -> int:
        return (self._shape_behind if place else self._shape).num_sequences

    def _go_on_working(self) -> None:
        if not self._is_stepping:
            if (load := self._decode.begin_step(self._agenda.now)) is not None:
                self._start(self._load_shape(load))
            self._do(self._decode.flush())
        if self._is_stepping:
            if (ahead := self._decode.plan_step_ahead()) is not None:
                self._foretell(StepShape(ahead.num_sequences, ahead.num_tokens))
            self._expect()

    def _foretell(self, shape: StepShape) -> None:
        """The step behind the present one has that shape: other sequences may take part in it than was known."""
        if len(self._ends_at) == 1:
            self._shape_behind = shape
        elif shape != self._shape_at(self._present + 1):
            self._begin_anew(shape)

    def _expect(self) -> None:
        """Puts the end of the first step that is not quiet on the agenda, or of the one behind so many. Where one
        before these is there already, what is behind it can wait."""
        place = present = self._present
        if self.may_skip:
            place += self._decode.num_quiet_steps(max(self._expected - present, 0) or MOST_SKIPPED)
        if place == self._expected:
            return
        ends_at = self._ends_at
        num_known = len(ends_at)
        if place >= num_known:
            shape = self._shape_at(num_known)
            seconds = self._steps_ahead(shape, place + 1 - num_known, self._num_busy)
            ends_at[-1:] = accumulate(seconds, initial=ends_at[-1])
        self._expected = place
        self._version += 1
        self._agenda.at(ends_at[place], self.number, self._end_step, self._version)
        self._note_due()

    def _end_step(self, version: int) -> None:
        if version == self._version:
            self.settle(self._agenda.now)
            if self.may_skip and self._decode.num_quiet_steps(1):
                self._expect()  # this one is quiet, too: only no further ones were computed
                return
            self._shape, self._present = self._shape_at(self._present), 0
        super()._end_step(version)

    def _send_coordinator(self, command: SendCoordinator) -> None:
        message = command.message
        if self.may_skip and isinstance(message, LockstepTokens) and self._can_wait(message):
            self._keep_untold([self._agenda.now + self.control_s], self._num_ended, message)
            self._note_due()
        else:
            super()._send_coordinator(command)

    def _can_wait(self, message: LockstepTokens) -> bool:
        """Whether nobody can take a request because of it, or do anything else that he could not before."""
        if message.left or (message.tokens and self.pool.role is not Role.DECODE):
            return False
        return all(token.finish is None for token in message.tokens)

    def _step_ended(self, seconds: float) -> None:
        self._num_ended = self._shape.num_sequences
        self._expected = -1
        commands, following = self._decode.end_step(seconds, self._agenda.now)
        if following is not None:
            self._start(self._load_shape(following))
        self._do(commands)
        self._go_on_working()

    def _load_shape(self, load: LockstepLoad) -> StepShape:
        if not load.chunks:
            return StepShape(load.num_sequences, load.num_tokens)
        return StepShape(load.num_sequences, load.num_tokens, *self._shape_of(load.chunks)[2:])
