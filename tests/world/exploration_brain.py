"""A worker core as a table: its states are numbers, and what an event makes of each is worked out once.

A core is a function of its state and its event, so in the product of two cores, a wire and six connections it need not
be computed again and again: it is looked up. A state is kept as a pickle in which everything that never changes (names,
messages, keys) stands as the number under which it was seen first, so that equal states have equal bytes. What only
tells of the past (stories, counters) is left out; free blocks, to which nobody may refer, are put in order.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import msgspec

from twinpool.engine.batch import StepOutput
from twinpool.engine.release_order import ReleaseOrder
from twinpool.layout import KVLayout
from twinpool.metrics import Counters
from twinpool.request import Job, RequestKey
from twinpool.worker.core import Command, Event, StepDone, StepPlan

_CONSTANT = (str, bytes, RequestKey, Job, KVLayout)


class Numbers:
    """Things that never change, and a number for each."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._things: list[Any] = []

    def number(self, thing: Hashable) -> int:
        """The number of `thing`, a new one if it was not seen before."""
        key = (type(thing), thing)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._things)
            self._things.append(thing)
        return number

    def __getitem__(self, number: int) -> Any:
        return self._things[number]

    def __len__(self) -> int:
        return len(self._things)


@dataclass(frozen=True, slots=True)
class Reaction:
    """What an event makes of a state: the next one, what is to be carried out, and by number the step that starts and
    the plan ahead."""

    state: int
    commands: tuple[Command, ...]
    step: int | None
    ahead: int | None


@dataclass(frozen=True, slots=True)
class View:
    """What the rules look at in a state.

    `lent` maps a fence to the blocks that its writer may write (decode) or that its job reads from (prefill), `job_of`
    to that job; `tables` maps a job to its blocks. `deadlines` are those of live leases. `busy` says what is held, and
    is empty if everything is free.
    """

    lent: dict[int, tuple[int, ...]]
    job_of: dict[int, RequestKey]
    tables: dict[RequestKey, tuple[int, ...]]
    deadlines: tuple[float, ...]
    busy: str


class Brain:
    """All states of one worker's core that were reached. `make(life)` is the core of a new process."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make
        self._constants = Numbers()
        self._states = Numbers()
        self._reactions: dict[Hashable, Reaction] = {}
        self._views: dict[int, View] = {}
        self.plans = Numbers()
        self._aheads = Numbers()

    def __len__(self) -> int:
        return len(self._states)

    def born(self, life: str) -> int:
        """The first state of a process."""
        return self._freeze(self._make(life))

    def react(self, state: int, event: Event, now: float, may_step: bool) -> Reaction:
        """The core in `state` takes `event`, and plans a step if `may_step`. Raises what the core raises."""
        key = (state, event, now, may_step)
        if (known := self._reactions.get(key)) is None:
            known = self._reactions[key] = self._work_out(state, event, now, may_step)
        return known

    def step_done(self, state: int, plan: int, following: int | None, now: float) -> Reaction:
        """The step of that number has run, and another runs since then; or the core plans the next one at once."""
        key = (state, "done", plan, following, now)
        if (known := self._reactions.get(key)) is None:
            then = None if following is None else self.plans[following]
            done = StepDone(self.plans[plan], _output(self.plans[plan]), then)
            known = self._reactions[key] = self._work_out(state, done, now, then is None)
        return known

    def following(self, step: int, ahead: int | None) -> int | None:
        """The step that begins when that one ends, if the plan ahead comes to one."""
        if ahead is None:
            return None
        ran = self.plans[step]
        return _number(self.plans, self._aheads[ahead].resolve(ran, _output(ran)))

    def view(self, state: int) -> View:
        """What the rules look at."""
        if state not in self._views:
            self._views[state] = _look(self._thaw(state))
        return self._views[state]

    def _work_out(self, state: int, event: Event, now: float, may_step: bool) -> Reaction:
        core = self._thaw(state)
        commands = core.handle(event, now)
        plan, ahead = None, None
        if may_step:
            plan = core.next_step(now)
            commands += core.flush()
        if plan is not None or not may_step:
            ahead = core.plan_ahead()
        core.check()
        return Reaction(
            self._freeze(core), tuple(commands), _number(self.plans, plan), _number(self._aheads, ahead)
        )

    def _freeze(self, core: Any) -> int:
        pool = core.pool
        pool._free.sort(reverse=True)
        pool._cached = ReleaseOrder(pool._cached)
        pool._tables = sorted(pool._tables, key=lambda table: table.block_ids)
        if (ledger := getattr(core, "_ledger", None)) is not None:
            for held in ledger.reservations():
                held.story.clear()
        file = io.BytesIO()
        _Pickler(file, self._constants).dump(core)
        return self._states.number(file.getvalue())

    def _thaw(self, state: int) -> Any:
        core = _Unpickler(io.BytesIO(self._states[state]), self._constants).load()
        core.pool._tables = set(core.pool._tables)
        return core


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, constants: Numbers) -> None:
        super().__init__(file, protocol=5)
        self._constants = constants

    def persistent_id(self, thing: Any) -> int | None:
        if type(thing) is Counters:
            return -1
        if type(thing) is tuple:
            is_constant = all(type(part) in (int, str) for part in thing)
        else:
            is_constant = type(thing) in _CONSTANT or isinstance(thing, msgspec.Struct)
        return self._constants.number(thing) if is_constant else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, constants: Numbers) -> None:
        super().__init__(file)
        self._constants = constants

    def persistent_load(self, number: int) -> Any:
        return Counters() if number < 0 else self._constants[number]


def _output(plan: StepPlan) -> StepOutput:
    return StepOutput({chunk.key: 100 + chunk.end for chunk in plan.batch.slices if chunk.sampling}, 0.0)


def _number(things: Numbers, thing: Hashable | None) -> int | None:
    return None if thing is None else things.number(thing)


def _look(core: Any) -> View:
    stats = core.stats()
    busy = (stats.waiting, stats.running, stats.leased_blocks, stats.quarantined_blocks)
    is_free = stats.free_blocks == core.pool.num_blocks and not any(busy)
    told = "" if is_free else repr(msgspec.structs.replace(stats, counters={}))
    if (ledger := getattr(core, "_ledger", None)) is None:
        jobs = {job.key: job.prompt.table.block_ids for job in core._outbox if job.prompt.table}
        job_of = {fence: job.key for fence, job in core._outbox._by_fence.items()}
        return View({fence: jobs.get(key, ()) for fence, key in job_of.items()}, job_of, jobs, (), told)
    held = list(ledger.reservations())
    return View(
        lent={one.fence: one.block_ids for one in held},
        job_of={one.fence: one.key for one in held},
        tables={sequence.key: sequence.table.block_ids for sequence in core._scheduler},
        deadlines=tuple(one.deadline for one in held if ledger.expired(one.deadline)),
        busy=told,
    )
