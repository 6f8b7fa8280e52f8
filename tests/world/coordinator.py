"""The coordinator process: the real core, and a shell in virtual time."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from twinpool.config import RecordConfig
from twinpool.coordinator.events import (
    Agree,
    Command,
    Decline,
    Emit,
    EndProcess,
    Event,
    FromWorker,
    Note,
    Reassign,
    Record,
    Refuse,
    Retire,
    Send,
    StartWorker,
    Tick,
    WorkerLost,
)
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.state import CoordinatorCore
from twinpool.errors import InvariantViolation
from twinpool.messages import Dropped, DropReason, Generate, Message, Prefill, Reserve, Stop, TakeRole
from twinpool.metrics import CoordinatorMetric
from twinpool.request import RequestState
from world import hybrid
from world.model import EOS
from world.schedule import Actor
from world.story import Broken

if TYPE_CHECKING:
    from world.client import Client
    from world.world import World

TICK_S = 0.1
CANCEL_LIMIT_S = 1.0
"""A promise of the server, network delays of the world included."""


class CoordinatorProcess(Actor):
    """One coordinator, and the clients that it has heard of."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(f"coordinator/{number}")
        self._world = world
        config = replace(world.scenario.coordinator, record=RecordConfig("of the world"))
        self.core = CoordinatorCore(config, (EOS,))
        self._recorded: list[EndedRequest] = []
        self.clients: dict[str, Client] = {}
        self._live: dict[str, None] = {}
        self._sent_back: dict[str, set[int]] = {}
        self._events: deque[Event] = deque()
        self._is_handling = False

    def begin(self) -> None:
        """Its clock ticks."""
        self.handle(Tick())
        self._check_cancels()
        self._world.schedule.after(TICK_S, self, self.begin)

    def handle(self, event: Event) -> None:
        """Feeds the core. An event that a command causes (a worker out of reach) waits its turn."""
        self._events.append(event)
        if self._is_handling or not self.is_alive:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle_one(self._events.popleft())
        finally:
            self._is_handling = False

    def _handle_one(self, event: Event) -> None:
        schedule, story = self._world.schedule, self._world.story
        story.tell(schedule.now, self.name, event)
        match event:
            case FromWorker(
                message=Dropped(key=(request_id, attempt), reason=DropReason.PREEMPTED | DropReason.NO_ROOM)
            ):
                self._sent_back.setdefault(request_id, set()).add(attempt)
        try:
            commands = self.core.handle(event, schedule.now)
            self.core.check()
        except InvariantViolation as exc:
            raise Broken("the core's own books", f"{self.name} at {event}: {exc}") from exc
        for command in commands:
            if isinstance(command, Record):
                self._recorded.append(command.ended)
                continue
            story.tell(schedule.now, self.name, command)
            self._carry_out(command)
        self._check_ended()

    def _check_cancels(self) -> None:
        """Whoever can hear a Cancel has let go of everything soon after."""
        too_old = self._world.schedule.now - CANCEL_LIMIT_S
        for member in self.core.registry:
            worker = self._world.workers.get((member.worker_id, member.incarnation))
            if worker is None or worker.was_frozen:
                continue
            for leg in member.legs.values():
                if leg.cancelled_at is not None and leg.cancelled_at < too_old:
                    raise Broken("a Cancel is obeyed in time", f"{worker.name} has not let go of {leg.key}")

    def _check_ended(self) -> None:
        """A request that has just ended is worked on nowhere, apart from processes that are given up."""
        live = self.core._custody.requests
        for request_id in [request_id for request_id in self._live if request_id not in live]:
            del self._live[request_id]
            for worker in self._world.workers.values():
                if self.core.registry.live(*worker.identity) and worker.auditor.works_on(request_id):
                    raise Broken("who has ended owns nothing", f"{worker.name} still works on {request_id}")
        if len(live) > len(self._live):
            self._live.update(dict.fromkeys(live))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Emit(request_id, output):
                self.clients[request_id].emitted(output)
            case Refuse(request_id, error):
                self.clients[request_id].refused(error)
            case Send(worker_id, incarnation, message):
                self._check_choice(worker_id, message)
                self._check_departure(worker_id, message)
                worker = self._world.workers.get((worker_id, incarnation))
                if worker is None:
                    self.handle(WorkerLost(worker_id, incarnation, "is out of reach"))
                else:
                    self._world.network.to_worker(worker, message)
            case EndProcess(worker_id, pid):
                self._world.end_process(worker_id, pid)
            case StartWorker(role):
                self._world.start_worker(role)
            case Reassign(worker_id, role):
                if self._world.scenario.is_ours:
                    self._world.kept[worker_id] = role
            case Retire(worker_id, _):
                if self._world.scenario.is_ours:
                    self._world.retire(worker_id)
            case Agree() | Decline():
                pass
            case Note(text, is_fault):
                if is_fault:
                    raise Broken("no worker says what it must not", text)

    def _check_choice(self, worker_id: str, message: Message) -> None:
        prefill = self.core.registry.get(worker_id)
        pace = self._world.scenario.pace
        if isinstance(message, Prefill) and pace and prefill and message.job.key in prefill.legs:
            hybrid.check_choice(self.core, pace, prefill, message, self._world.schedule.now)

    def _check_departure(self, worker_id: str, message: Message) -> None:
        """A worker on its way out gets no work, and goes when it holds nothing and others stay."""
        worker = self.core.registry.get(worker_id)
        if worker is None or worker.departure is None or self.core.pools.is_closed:
            return
        if isinstance(message, Prefill | Reserve | Generate):
            raise Broken("who is to leave gets nothing new", f"{worker_id} gets {message}")
        if isinstance(message, Stop | TakeRole):
            others = [w for w in self.core.registry.of_role(worker.role) if w.departure is None]
            if worker.legs or not others:
                raise Broken(
                    "no pool is left empty", f"{worker_id} is told {message}, {len(worker.legs)} legs"
                )

    def check_counts(self) -> None:
        """At the end: the metrics obey the laws of conservation."""
        tally = self.core.tally
        ends: dict[str, int] = {}
        num_tokens = 0
        for client in self.clients.values():
            client.check_end(self.core, self._sent_back.get(client.name, set()))
            ends[client.state] = ends.get(client.state, 0) + 1
            num_tokens += client.num_emitted
        counted = {state: n for state, n in tally.counts(CoordinatorMetric.REQUESTS).items() if n}
        if counted != ends:
            raise Broken("requests are counted once", f"{counted} are counted, clients saw {ends}")
        self._check_record(ends)
        delivered = tally.count(CoordinatorMetric.TOKENS_DELIVERED)
        if delivered != num_tokens:
            raise Broken("tokens are counted once", f"{delivered} are counted, clients got {num_tokens}")
        for metric in (CoordinatorMetric.DUPLICATE_TOKENS, CoordinatorMetric.PROTOCOL_FAULTS):
            if count := sum(tally.counts(metric).values()):
                raise Broken("no worker says what it must not", f"{metric} is {count}")

    def _check_record(self, ends: dict[str, int]) -> None:
        """Every request is recorded once, with the outcome and the tokens that its client saw."""
        recorded = [*self._recorded, *self.core.ended(self._world.schedule.now, settle_s=0.0)]
        outcomes = Counter(ended.outcome.value for ended in recorded)
        if outcomes != ends or len({ended.request_id for ended in recorded}) != len(recorded):
            raise Broken("requests are recorded once", f"{dict(outcomes)} are recorded, clients saw {ends}")
        for ended in recorded:
            if ended.facts is not None and ended.outcome is RequestState.COMPLETED:
                known = ended.facts.num_cached_tokens + ended.facts.num_computed_tokens
                if known != len(ended.prompt_token_ids):
                    raise Broken("cached and computed are the prompt", f"{ended}")

    def what_is_held(self) -> str:
        """What this coordinator still holds of any request; empty when nothing lives."""
        held = [f"{self.core.num_live} live"] if self.core.num_live else []
        if len(self.core.queue) or self.core.queue.num_tokens:
            held.append(f"queue of {len(self.core.queue)}, {self.core.queue.num_tokens} tokens")
        held += [
            f"{w.worker_id} {w.departure.purpose}" for w in self.core.registry if w.departure is not None
        ]
        held += [
            f"{len(worker.legs)} legs on {worker.worker_id}"
            for worker in self.core.registry
            if worker.legs or worker.pending_tokens or worker.held_tokens
        ]
        return f"{self.name}: {', '.join(held)}" if held else ""
