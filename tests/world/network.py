"""How messages travel: encoded, late, in order per connection, sometimes not at all."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from twinpool.coordinator.events import FromWorker
from twinpool.messages import Message, PromptLogprobs, decode, encode
from world.schedule import Actor, Schedule

if TYPE_CHECKING:
    from world.worker import Identity, WorkerProcess
    from world.world import World

NOTICED_S = 0.1
"""Within so long a worker notices that its connection broke: before it is up again."""

BULKY_S = 0.05
"""For up to so long a message about each token of a prompt keeps its connection busy: what follows comes after it."""

Connection = tuple[object, ...]


class Network:
    """Connections between processes. Messages of one connection keep their order; all else may overtake.

    `jitter_s` bounds a usual delay; one message in `slow_one_in` takes up to `slow_s`.
    """

    def __init__(self, world: World, schedule: Schedule, random: Random) -> None:
        self._world = world
        self._schedule = schedule
        self._random = random
        self._last_at: dict[Connection, float] = {}
        self._broken: set[Identity] = set()
        self._met: set[tuple[Actor, Actor]] = set()
        self._loss: dict[frozenset[Identity], float] = {}
        self._usual_loss = world.scenario.peer_loss

    def to_coordinator(self, sender: WorkerProcess, message: Message) -> None:
        """A worker speaks to the coordinator."""
        coordinator, received = self._world.coordinator, decode(encode(message))
        event = FromWorker(*sender.identity, received)

        def deliver() -> None:
            # The first offer of a process that has died, overtaken by that of the next, would drive that one out, until
            # the dead one's lease ends. It takes a coordinator that hears nobody for as long as a worker takes to load,
            # and nothing tells which of two strangers came first: their clocks are not compared.
            is_too_late = (coordinator, sender) not in self._met and not sender.is_alive
            if not is_too_late and sender.identity not in self._broken:
                self._met.add((coordinator, sender))
                coordinator.handle(event)

        connection = (sender.identity, coordinator.name)
        self._carry(connection, coordinator, deliver)
        if isinstance(message, PromptLogprobs):
            self._last_at[connection] += self._random.random() * BULKY_S

    def to_worker(self, receiver: WorkerProcess, message: Message) -> None:
        """The coordinator speaks to a worker."""
        received = decode(encode(message))
        key = (self._world.coordinator.name, receiver.identity)

        def deliver() -> None:
            if receiver.identity not in self._broken:
                receiver.from_coordinator(received)

        self._carry(key, receiver, deliver)

    def break_control(self, worker: WorkerProcess) -> None:
        """The connection between the coordinator and a worker breaks, and all that is on it is lost: when the worker
        notices, it starts anew."""
        self._broken.add(worker.identity)
        noticed_s = self._random.random() * NOTICED_S
        self._schedule.after(noticed_s, worker, lambda: self._world.kill(worker, "its connection broke"))

    def to_peer(self, sender: WorkerProcess, receiver: Identity, message: Message) -> None:
        """A worker speaks to another; dropped if that one is gone, or the network loses it."""
        worker, received = self._world.workers.get(receiver), decode(encode(message))
        loss = self._loss.get(frozenset((sender.identity, receiver)), self._usual_loss)
        if worker is None or (loss and self._random.random() < loss):
            self._world.story.tell(self._schedule.now, "network", f"loses {message}")
            return
        self._carry((sender.identity, receiver), worker, lambda: worker.from_peer(sender.identity, received))

    def lose(self, one: Identity, other: Identity, share: float) -> None:
        """From now on so many of the messages between these two are lost; 1: they are cut off."""
        self._loss[frozenset((one, other))] = share

    def heal(self) -> None:
        """Loses nothing any more."""
        self._loss.clear()
        self._usual_loss = 0.0

    def reaches(self, one: Identity, other: Identity) -> bool:
        """Whether a handshake between these two gets through."""
        return self._loss.get(frozenset((one, other)), 0.0) < 1.0

    def _carry(self, connection: Connection, receiver: Actor, deliver: Callable[[], None]) -> None:
        scenario = self._world.scenario
        delay = self._random.random() * scenario.jitter_s
        if scenario.slow_one_in and not self._random.randrange(scenario.slow_one_in):
            delay += self._random.random() * scenario.slow_s
        moment = max(self._schedule.now + delay, self._last_at.get(connection, 0.0))
        self._last_at[connection] = moment
        self._schedule.at(moment, receiver, deliver)
