"""One run: processes, clients and faults on one schedule, from the first event until everything is free again."""

from __future__ import annotations

from random import Random

from twinpool.config import Role
from twinpool.coordinator.custody import HANDED_ON
from twinpool.coordinator.events import ChangeRole, DrainWorker, SetPools, WorkerLost
from twinpool.coordinator.registry import OTHER_ROLE
from twinpool.metrics import CoordinatorMetric
from world.client import Ask, Client
from world.coordinator import CoordinatorProcess
from world.network import Network
from world.scenario import Fault, FaultKind, Scenario, Wish, WishKind
from world.schedule import Actor, Schedule
from world.story import Broken, Story
from world.worker import Identity, WorkerProcess

MAX_EVENTS = 400_000
END_WITHIN_S = 60.0
"""All requests end within so long after the last fault."""
FREE_WITHIN_S = 8.0
"""Everything is free within so long after the last request ended: a few leases and their reminders."""
LOOK_S = 0.1
ON_WORKERS = (FaultKind.KILL, FaultKind.FREEZE, FaultKind.LEAVE, FaultKind.BREAK_CONTROL)


class World:
    """A deployment and its clients. `workers` are the processes that live."""

    def __init__(self, scenario: Scenario, story: Story | None = None) -> None:
        self.scenario = scenario
        self.story = story or Story()
        self.schedule = Schedule()
        self.random = Random(scenario.seed + 1)
        self.network = Network(self, self.schedule, self.random)
        self.workers: dict[Identity, WorkerProcess] = {}
        self.clients = [Client(self, ask) for ask in scenario.asks]
        self.kept: dict[str, Role] = {}
        """Workers that are started again when they end, by name, and in which role."""
        self._num_started = 0
        self._is_calm = not scenario.peer_loss
        self._fate = Actor("fate")
        self.coordinators: list[CoordinatorProcess] = []
        self.coordinator = self._start_coordinator()
        for role, count in scenario.pools.items():
            for index in range(count):
                self.start_worker(role, f"{role}-{index}")
        for client in self.clients:
            self.schedule.at(client.ask.at_s, client, client.submit)
        for fault in scenario.faults:
            self.schedule.at(fault.at_s, self._fate, lambda fault=fault: self.strike(fault))
        for wish in scenario.wishes:
            self.schedule.at(wish.at_s, self._fate, lambda wish=wish: self.want(wish))

    # ── a run ───────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Runs to the end. Raises Broken at the first promise that is not kept."""
        last_ask_s = max((ask.at_s for ask in self.scenario.asks), default=0.0)
        self.run_until_s(max(last_ask_s, self.scenario.faults_end_s))
        self.network.heal()
        self._run_until_ended()
        self._run_until_free()
        for coordinator in self.coordinators:
            if coordinator.is_alive:
                coordinator.check_counts()
        if self._is_calm:
            self._check_calm()

    def run_until_s(self, moment: float) -> None:
        """Everything up to `moment` happens."""
        while self.schedule.now < moment:
            self.step()

    def step(self) -> None:
        """The next thing happens."""
        self.schedule.step()

    def submit(self, ask: Ask) -> Client:
        """A request that the scenario does not have comes now."""
        client = Client(self, ask)
        self.clients.append(client)
        client.submit()
        return client

    def of_role(self, role: Role) -> list[WorkerProcess]:
        """The workers of a role."""
        return [worker for worker in self.workers.values() if worker.role is role]

    def _run_until_ended(self) -> None:
        until = self.schedule.now + END_WITHIN_S
        while waiting := [client for client in self.clients if not client.is_over]:
            if self.schedule.now > until:
                raise Broken(
                    "every request ends",
                    f"after {END_WITHIN_S:g} s {waiting[0].name} has not: {self._stories()}",
                )
            self.run_until_s(self.schedule.now + LOOK_S)

    def _run_until_free(self) -> None:
        until = self.schedule.now + FREE_WITHIN_S
        while held := self.what_is_held():
            if self.schedule.now > until:
                raise Broken(
                    "everything is free in the end", f"after {FREE_WITHIN_S:g} s: {held} {self._stories()}"
                )
            self.run_until_s(self.schedule.now + LOOK_S)

    def what_is_held(self) -> str:
        """What anybody still holds of any request; empty when everything is free."""
        actors = (*self.coordinators, *self.workers.values())
        return "; ".join(held for actor in actors if actor.is_alive and (held := actor.what_is_held()))

    def _stories(self) -> str:
        return "; ".join(r.story() for r in self.coordinator.core._custody.requests.values())

    def _check_calm(self) -> None:
        """Where nothing went wrong nothing may be lost: only lack of room starts a request anew."""
        lost = self.coordinator.core.tally.counts(CoordinatorMetric.WORKERS_LOST)
        if sum(lost.values()):
            raise Broken("nothing is lost where nothing went wrong", f"workers: {lost}")
        for client in self.clients:
            if client.error is not None and "was lost" in client.error.message:
                raise Broken("nothing is lost where nothing went wrong", f"{client.name}: {client.error}")
            timeline = self.coordinator.core.timeline(client.name)
            lost = [a.ended for a in timeline.attempts if a.ended] if timeline else []
            if any(not ended.startswith(("preempted", "no_room", "revoked", HANDED_ON)) for ended in lost):
                raise Broken("nothing is lost where nothing went wrong", f"{client.name}: {lost}")

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────

    def step_s(self) -> float:
        """How long a model step takes."""
        return self.random.uniform(*self.scenario.step_s)

    def _start_coordinator(self) -> CoordinatorProcess:
        coordinator = CoordinatorProcess(self, len(self.coordinators))
        self.coordinators.append(coordinator)
        self.schedule.after(0.0, coordinator, coordinator.begin)
        return coordinator

    def start_worker(self, role: Role, worker_id: str = "", past: WorkerProcess | None = None) -> None:
        """A process begins: a new one, or the `past` one in another role."""
        self._num_started += 1
        worker_id = worker_id or f"{role}-more-{self._num_started}"
        self.kept[worker_id] = role
        worker = WorkerProcess(self, role, worker_id, self._num_started, past)
        self.workers[worker.identity] = worker
        self.story.tell(self.schedule.now, worker.name, "starts")
        self.schedule.after(0.0, worker, worker.begin)

    def kill(self, worker: WorkerProcess, why: str) -> None:
        """The process is gone at once. Others notice in time; a new one takes its place."""
        if not worker.is_alive:
            return
        self.story.tell(self.schedule.now, worker.name, f"ends: {why}")
        worker.is_alive = False
        del self.workers[worker.identity]
        for other in self.workers.values():
            other.links.broke(worker.identity)
        if self.scenario.is_ours:
            lost = WorkerLost(*worker.identity, "exited")
            coordinator = self.coordinator
            self.schedule.after(self.random.random() * 0.3, coordinator, lambda: coordinator.handle(lost))
        restart_s = self.random.choice((0.0, 0.05, 0.6))
        self.schedule.after(restart_s, self._fate, lambda: self._start_again(worker.identity[0]))

    def _start_again(self, worker_id: str) -> None:
        if (role := self.kept.get(worker_id)) is not None:
            self.start_worker(role, worker_id)

    def change_role(self, worker: WorkerProcess, role: Role) -> None:
        """The process goes on in another role, with its pool: nobody may write there any more for the one that it had.
        Whoever pushes to it over a two-sided link finds that closed."""
        self.story.tell(self.schedule.now, worker.name, f"becomes {role}")
        worker.is_alive, worker.has_another_role = False, True
        del self.workers[worker.identity]
        if not self.scenario.is_one_sided:
            for other in self.workers.values():
                other.links.broke(worker.identity)
        self.start_worker(role, worker.identity[0], worker)

    def retire(self, worker_id: str) -> None:
        """A worker of the server's is not started again, and its process ends if it has not joined yet."""
        self.kept.pop(worker_id, None)
        if self.coordinator.core.registry.get(worker_id) is None:
            for worker in [w for w in self.workers.values() if w.identity[0] == worker_id]:
                self._is_calm = False  # its Register may be on the way
                self.kill(worker, "retired before it joined")

    # ── wishes ──────────────────────────────────────────────────────────────────────────────────────────────

    def want(self, wish: Wish) -> None:
        """An operator wants it now."""
        self.story.tell(self.schedule.now, "operator", wish)
        coordinator, members = self.coordinator, list(self.coordinator.core.registry)
        if coordinator.is_frozen or not members:
            return
        member = members[wish.which % len(members)]
        match wish.kind:
            case WishKind.ROLE:
                role = OTHER_ROLE[member.role]
                coordinator.handle(ChangeRole("wish", member.worker_id, role, wish.wait_s))
            case WishKind.DRAIN:
                coordinator.handle(DrainWorker("wish", member.worker_id, wish.wait_s))
            case WishKind.SET:
                kept = dict(self.kept) if self.scenario.is_ours else {}
                why_not = "" if self.scenario.is_ours else "start one by hand"
                coordinator.handle(SetPools("wish", *wish.numbers, wish.wait_s, kept, why_not))

    def end_process(self, worker_id: str, pid: int) -> None:
        """The coordinator has a process ended, if it is one of its own."""
        if self.scenario.is_ours:
            for worker in [w for w in self.workers.values() if (w.identity[0], w.pid) == (worker_id, pid)]:
                if not worker.was_frozen:
                    raise Broken("nobody healthy is given up", f"{worker.name} is to be ended")
                self.kill(worker, "ended by the coordinator")

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────

    def strike(self, fault: Fault) -> None:
        """It happens now."""
        self._is_calm = False
        self.story.tell(self.schedule.now, "fate", fault)
        workers = list(self.workers.values())
        pairs = [(worker, wire) for worker in workers for wire in worker.links.senders.values()]
        if fault.kind is FaultKind.NEW_COORDINATOR:
            self._restart_coordinator(fault.for_s)
        elif workers and fault.kind in ON_WORKERS:
            self._strike_worker(workers[fault.which % len(workers)], fault)
        elif pairs:
            worker, wire = pairs[fault.which % len(pairs)]
            match fault.kind:
                case FaultKind.BREAK_LINK:
                    worker.links.broke(wire.peer.identity)
                case FaultKind.CORRUPT:
                    wire.num_to_corrupt += 1
                case FaultKind.LOSE_BYTES:
                    wire.num_to_lose += 1
                case FaultKind.FREEZE_WRITING:
                    wire.freeze_s = fault.for_s
                case FaultKind.SLOW_WIRE:
                    wire.slowness = 50.0
                case FaultKind.LOSE_MESSAGES | FaultKind.CUT_OFF:
                    share = 0.5 if fault.kind is FaultKind.LOSE_MESSAGES else 1.0
                    self.network.lose(worker.identity, wire.peer.identity, share)

    def _strike_worker(self, worker: WorkerProcess, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL:
                self.kill(worker, "killed")
            case FaultKind.FREEZE:
                self.freeze(worker, fault.for_s)
            case FaultKind.BREAK_CONTROL:
                self.network.break_control(worker)
            case FaultKind.LEAVE if not worker.is_frozen:
                worker.leave("told to")

    def freeze(self, worker: WorkerProcess, seconds: float) -> None:
        """The process stands still for so long, in whatever it does."""
        if not worker.is_frozen:
            worker.is_frozen = worker.was_frozen = True
            self.schedule.after(seconds, self._fate, lambda: self._thaw(worker))

    def _thaw(self, worker: WorkerProcess) -> None:
        self.story.tell(self.schedule.now, worker.name, "goes on")
        self.schedule.thaw(worker)

    def _restart_coordinator(self, down_s: float) -> None:
        old = self.coordinator
        old.is_alive = False
        for client in old.clients.values():
            client.disconnect()
        self.coordinator = self._start_coordinator()
        self.coordinator.is_frozen = True
        self.schedule.after(down_s, self._fate, lambda: self.schedule.thaw(self.coordinator))
