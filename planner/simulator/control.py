"""The coordinator in virtual time: its core, what workers tell it, and what it tells them and clients."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from twinpool.coordinator import events
from twinpool.coordinator.custody import LACK_OF_ROOM
from twinpool.coordinator.reports import FULL_PAUSE_S
from twinpool.coordinator.service import Output
from twinpool.coordinator.state import CoordinatorCore
from twinpool.errors import ConfigError, InvariantViolation, RequestError
from twinpool.messages import (
    Denied,
    Dropped,
    Granted,
    HandoffReport,
    Message,
    Peers,
    PrefillReport,
    Welcome,
)
from twinpool.planner.simulator.agenda import LATER, STEP_MESSAGES, Agenda
from twinpool.planner.simulator.lockstep import LockstepWorker
from twinpool.planner.simulator.worker import SimulatedWorker

TICK_S = 0.1
_KNOWN = frozenset({Welcome, Peers})
"""What these say every simulated worker knows from the start."""
_OF_NO_STREAM = frozenset({Granted, HandoffReport, PrefillReport})
"""What these say has nothing to do with streams that run: steps that were not told can wait."""


class Clients(Protocol):
    """Who hears of requests. Times are when they do."""

    def emitted(self, request_id: str, output: Output, at_s: float) -> None:
        """The next output of a request."""
        ...

    def emitted_run(self, request_id: str, first_index: int, times: Sequence[float]) -> None:
        """A token at each of these times."""
        ...

    def refused(self, request_id: str, error: RequestError, at_s: float) -> None:
        """The request was not admitted."""
        ...


class Control:
    """The coordinator. `workers` are set once. Messages take `Overheads.control_s` of the worker's.

    Steps that a `LockstepWorker` skips are told when the core hears of that worker's streams, with each heartbeat, and
    before the core recounts. In between they matter to routing alone, which looks at the slots that some workers hold:
    those the core is told when it asks.
    """

    def __init__(self, core: CoordinatorCore, agenda: Agenda, clients: Clients) -> None:
        self.core = core
        self.warnings: list[str] = []
        self._agenda = agenda
        self._clients = clients
        self._by_id: dict[str, SimulatedWorker] = {}
        self._skipping: list[LockstepWorker] = []
        self._foresighted: dict[str, LockstepWorker] = {}
        self._skips_again_at = 0.0
        self._rank = LATER
        """Of what the core hears of now."""

    def employ(self, workers: Sequence[SimulatedWorker]) -> None:
        """These are all workers."""
        self._by_id = {worker.worker_id: worker for worker in workers}
        self._skipping = [each for each in workers if isinstance(each, LockstepWorker) and each.may_skip]
        self._foresighted = {worker.worker_id: worker for worker in self._skipping}
        if self._skipping:
            self.core.registry.foresee = self._foresee

    def tell(self, worker: SimulatedWorker, message: Message, rank: int) -> None:
        """A worker sends a message."""
        when = self._agenda.now + worker.control_s
        self._agenda.at(when, rank, self._hear_later, (worker, message, rank))

    def hear(self, worker: SimulatedWorker, message: Message) -> None:
        """A worker's message is here."""
        self.handle(events.FromWorker(worker.worker_id, worker.incarnation, message), worker.late_s)

    def handle(self, event: events.Event, on_the_way_s: float = 0.0) -> None:
        """The core hears of `event`. What it gives out is with clients after `on_the_way_s`."""
        now = self._agenda.now
        for command in self.core.handle(event, now):
            self._do(command, now + on_the_way_s)

    def _hear_later(self, told: tuple[SimulatedWorker, Message, int]) -> None:
        worker, message, rank = told
        is_of_streams = type(message) not in _OF_NO_STREAM
        if is_of_streams and isinstance(worker, LockstepWorker) and worker.due_at <= self._agenda.now:
            self._tell_of_steps(worker, rank)
        self._rank = rank
        self.hear(worker, message)
        self._rank = LATER
        if isinstance(message, Dropped) and message.reason in LACK_OF_ROOM:
            self._pause_skipping()

    def _do(self, command: events.Command, at_s: float) -> None:
        match command:
            case events.Send(worker_id, _, message):
                self._pass_on(self._by_id[worker_id], message)
            case events.Emit(request_id, output):
                self._clients.emitted(request_id, output, at_s)
            case events.EmitRun(worker_id, request_id, _, first_index, times):
                late_s = self._by_id[worker_id].late_s
                seen = [told_s + late_s for told_s in times] if late_s else times
                self._clients.emitted_run(request_id, first_index, seen)
            case events.Refuse(request_id, error):
                self._clients.refused(request_id, error, at_s)
            case events.Note(text, is_fault) if is_fault:
                self.warnings.append(text)
            case events.EndProcess(worker_id):
                raise InvariantViolation(f"{worker_id} counts as lost in a simulation, where none can be")

    def _pass_on(self, worker: SimulatedWorker, message: Message) -> None:
        if isinstance(message, Denied):
            raise ConfigError(f"the deployment is none that serves: {message.reason}")
        if type(message) not in _KNOWN:
            when = self._agenda.now + worker.control_s
            self._agenda.at(when, LATER, worker.from_coordinator, message)

    # ── steps that were skipped ─────────────────────────────────────────────────────────────────────────────

    def _foresee(self, worker_id: str) -> None:
        """The core looks at what the worker holds, perhaps more than it was told."""
        now, worker = self._agenda.now, self._foresighted.get(worker_id)
        if worker is not None and worker.foreseen_until <= now:
            with_now = STEP_MESSAGES + worker.number <= self._rank
            self.core.hold(worker_id, worker.foresee(now, with_now=with_now))

    def tell_of_all_steps(self) -> None:
        """The core hears of all that it would know of by now."""
        for worker in self._skipping:
            if worker.due_at <= self._agenda.now:
                self._tell_of_steps(worker, LATER)

    def _tell_of_steps(self, worker: LockstepWorker, rank: int) -> None:
        """Of one worker's, before what has `rank`."""
        now = self._agenda.now
        worker.settle(now)
        if worker.num_foreseen:
            self.core.hold(worker.worker_id, -worker.num_foreseen)
        untold = worker.take_untold(now, with_now=STEP_MESSAGES + worker.number <= rank)
        for steps in untold:
            told = self.core.count_steps(worker.worker_id, worker.incarnation, steps.message, steps.times)
            for at_s, commands in told:
                for command in commands:
                    self._do(command, at_s + worker.late_s)

    def _pause_skipping(self) -> None:
        """A worker gets nothing new for a moment: whatever the core hears of first after that may send a request on."""
        self._skips_again_at = self._agenda.now + FULL_PAUSE_S + TICK_S
        for worker in self._skipping:
            self._tell_of_steps(worker, LATER)
            worker.skip_no_more()
            rank = STEP_MESSAGES + worker.number
            for steps in worker.take_untold(inf, with_now=True):
                # Whatever else came of such a step was sent after its tokens, and is on the agenda already.
                for at_s in steps.times:
                    self._agenda.at_first(at_s, rank, self._hear_later, (worker, steps.message, rank))
        self._agenda.at(self._skips_again_at, LATER, self._skip_again, self._skips_again_at)

    def _skip_again(self, at_s: float) -> None:
        if at_s == self._skips_again_at:
            for worker in self._skipping:
                worker.may_skip = True
