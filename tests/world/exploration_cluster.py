"""The ownership protocol in its smallest form: one prefill and one decode worker, a one-sided wire, a coordinator.

The worker cores, their ledger and block pools are the real ones. Everything that can be late lies in a queue or in a
set: messages of a connection, blocks that the wire has not read, blocks that have not landed, the end of a step, the
answer of a transport. `moves` lists what can happen next, each alone; `make` makes it happen, and raises `Broken` if a
rule falls.

The coordinator only forwards and cancels: a request that is lost has ended. Prefill's clock is far from decode's; time
passes only where `moves` says that a lease runs out, and in `rest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from twinpool.messages import (
    Cancel,
    Dropped,
    Granted,
    HandoffReport,
    Message,
    Prefill,
    PrefillReport,
    PushTo,
    Reserve,
    StepTokens,
)
from twinpool.worker.core import (
    CancelReceive,
    Command,
    Event,
    FinishPush,
    FromCoordinator,
    FromPeer,
    LinkLost,
    PeerGone,
    PeerLinked,
    PostReceive,
    Push,
    PushFailed,
    PushStopped,
    ReceiveCancelled,
    SendCoordinator,
    SendPeer,
    StopPush,
    Tick,
    Verify,
)
from world.exploration_brain import Reaction
from world.exploration_state import (
    LEASE_S,
    Broken,
    C,
    Cast,
    Client,
    D,
    Faults,
    P,
    other,
)
from world.exploration_wire import Wired

LONGEST_REST = 48
"""Rounds of a quarter lease in which everything must come free once nothing but time can move."""

Move = tuple[str, ...]


class Cluster(Wired):
    """What can happen in a state, and what comes of it."""

    @classmethod
    def new(cls, cast: Cast, faults: Faults) -> Cluster:
        """Two linked workers without requests."""
        cluster = cls(cast, faults, contents=("",) * cast.size.num_blocks)
        for name in (D, P):
            cluster._begin_life(name)
        cluster.linked_life = cluster._life(D)
        cluster._take(D, PeerLinked(P, cluster._life(P), "memory"))
        cluster._take(P, PeerLinked(D, cluster._life(D), "memory"))
        return cluster

    # ── what can happen ───────────────────────────────────────────────────────────────────────────────────

    def moves(self) -> Iterator[Move]:
        """Everything that can happen now, faults and new requests too."""
        yield from self.inner_moves()
        if len(self.clients) < len(self.cast.size.prompts):
            yield ("start", str(len(self.clients)))
        if self.faults.cancels:
            yield from (("cancel", name) for name, client in self.clients.items() if not client.ending)
        if self.faults.kills:
            yield from (("kill", name) for name in (P, D) if self.processes[name])
        if self.faults.freezes and self.processes[P]:
            yield ("freeze",)
        if self.faults.losses:
            yield from (("lose", *pair) for pair in ((P, D), (D, P)) if self.queues[pair])
        if self.faults.expiries and self.processes[D] and (self.verifying or self._view(D).deadlines):
            yield ("expire",)

    def inner_moves(self) -> Iterator[Move]:
        """What happens by itself, without faults, and without time."""
        for (sender, receiver), queue in self.queues.items():
            if queue and (receiver == C or self.processes[receiver]):
                yield ("deliver", sender, receiver)
        for name, process in self.processes.items():
            if process is not None:
                if process.step is not None:
                    yield ("step", name)
                if process.ended:
                    yield ("ended", name)
                yield from (("answer", name, str(number)) for number in sorted(set(process.answers)))
        if self.is_frozen_known:
            yield ("die",)
        yield from (("read", str(fence)) for fence in dict.fromkeys(item[0] for item in self.unread))
        yield from (("land", str(fence)) for fence in dict.fromkeys(item[0] for item in self.flying))

    def make(self, move: Move) -> None:
        """Makes one of the `moves`. Raises Broken, or what a core raises, if a rule falls."""
        kind, *where = move
        _MAKE[kind](self, *where)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing but time, a fault or a new request can move."""
        return next(self.inner_moves(), None) is None

    def rest(self) -> None:
        """Lets time pass, without faults, until everything is free. Raises Broken if that does not come, or if time was
        needed where nothing but cancels had happened."""
        if not self.is_disturbed and (held := self._who_holds()):
            raise Broken(f"only time will free what is held: {held}")
        for _ in range(LONGEST_REST):
            for name in (P, D):
                if (process := self.processes[name]) is not None:
                    self.processes[name] = replace(process, now=process.now + LEASE_S / 4)
                    if name == D:
                        self._give_up_verifying()
                    self._take(name, Tick())
            while (move := next(self.inner_moves(), None)) is not None:
                self.make(move)
            if not self._who_holds():
                return
        raise Broken(f"after {LONGEST_REST // 4} leases without faults: {self._who_holds()}")

    # ── the moves ─────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, name: str) -> None:
        self.clients[name] = Client()
        job = self.cast.size.job(name)
        self._post(C, P, FromCoordinator(Prefill(job, D)))
        self._post(C, D, FromCoordinator(Reserve(job, P, self._life(P))))

    def _cancel(self, name: str) -> None:
        self.faults = replace(self.faults, cancels=self.faults.cancels - 1)
        self._end(name, "cancelled")

    def _kill(self, name: str) -> None:
        """The process dies at once. The coordinator hears of it after all that it had said; what it had sent to the
        other worker can arrive until that one hears of it."""
        self.faults, self.is_disturbed = replace(self.faults, kills=self.faults.kills - 1), True
        self._post(name, C, PeerGone(name, self._life(name)))
        self.queues[C, name] = self.queues[other(name), name] = ()
        self.processes[name] = None
        self.unread = ()
        if name == D:
            self.flying = ()
            self.missing.clear()
            self.verifying.clear()
            for fence in self.finishing:
                self._answer_later(P, PushFailed(fence, "decode is gone"))
        self.finishing.clear()

    def _freeze(self) -> None:
        """Prefill is silent for so long that it counts as lost, but its process lives: its copies may go on."""
        self.faults, self.is_disturbed = replace(self.faults, freezes=self.faults.freezes - 1), True
        self.frozen = self._life(P)
        self.frozen_fences = tuple(sorted({item[0] for item in (*self.unread, *self.flying)}))
        self._post(P, C, LinkLost(P, self.frozen))
        self.queues[C, P] = self.queues[D, P] = ()
        self.processes[P] = None
        self.finishing.clear()

    def _die(self) -> None:
        """The frozen process is dead at last, and decode sees it."""
        self.unread = tuple(item for item in self.unread if item[0] not in self.frozen_fences)
        self.flying = tuple(item for item in self.flying if item[0] not in self.frozen_fences)
        self.frozen_fences, self.is_frozen_known = (), False
        self._answer_later(D, PeerGone(P, self.frozen))

    def _lose(self, sender: str, receiver: str) -> None:
        self.faults, self.is_disturbed = replace(self.faults, losses=self.faults.losses - 1), True
        self.queues[sender, receiver] = self.queues[sender, receiver][1:]

    def _expire(self) -> None:
        """Decode's leases run out, and so does the time of what it verifies."""
        self.faults, self.is_disturbed = replace(self.faults, expiries=self.faults.expiries - 1), True
        decode = self._process(D)
        self.processes[D] = replace(decode, now=decode.now + LEASE_S)
        self._give_up_verifying()
        self._take(D, Tick())

    def _deliver(self, sender: str, receiver: str) -> None:
        number, *rest = self.queues[sender, receiver]
        self.queues[sender, receiver] = tuple(rest)
        thing = self.cast.things[number]
        if receiver == C:
            self._heard(sender, thing)
            return
        if isinstance(thing, PeerGone):
            self.queues[thing.worker_id, receiver] = ()
            if receiver == D:
                self.flying = ()
        elif isinstance(thing, LinkLost):
            self.queues[P, D], self.is_frozen_known = (), True
        elif isinstance(thing, PeerLinked) and receiver == P:
            self.linked_life = thing.incarnation
        self._take(receiver, thing)

    def _step(self, name: str) -> None:
        process, brain = self._process(name), self.cast.brains[name]
        assert process.step is not None
        plan = brain.plans[process.step]
        for chunk in plan.batch.slices:
            self._look_at_reading(name, chunk.key, tuple(chunk.block_table), chunk.start)
        for push in plan.pushes:
            self._push(push, process.step_link)
        following = brain.following(process.step, process.ahead)
        ended = (*process.ended, (process.step, following))
        self.processes[name] = replace(process, step=following, ended=ended)
        if following is None and len(ended) == 1:
            self._ended(name)  # nothing runs meanwhile, so it makes no difference when the core hears of it

    def _ended(self, name: str) -> None:
        """The core hears of the first step that has ended."""
        process = self._process(name)
        (step, following), *rest = process.ended
        self.processes[name] = replace(process, ended=tuple(rest))
        done = self.cast.brains[name].step_done(process.state, step, following, process.now)
        self._reacted(name, done, may_step=following is None)

    def _answer(self, name: str, number: str) -> None:
        process = self._process(name)
        answers = list(process.answers)
        answers.remove(int(number))
        self.processes[name] = replace(process, answers=tuple(answers))
        event = self.cast.things[int(number)]
        if isinstance(event, PushStopped):  # up to here the transport went on
            self.unread = tuple(item for item in self.unread if item[0] != event.fence)
            self.flying = tuple(item for item in self.flying if item[0] != event.fence)
            self.finishing.pop(event.fence, None)
        self._take(name, event)

    # ── the coordinator ───────────────────────────────────────────────────────────────────────────────────

    def _heard(self, sender: str, thing: Any) -> None:
        match thing:
            case PeerGone() | LinkLost():
                self._lost(sender, thing)
            case Granted(key=key):
                client = self.clients[key.request_id]
                if P in client.legs and not client.ending:
                    self._post(C, P, FromCoordinator(_forwarded(thing, self._life(D))))
            case HandoffReport(key=key):
                self._close(key.request_id, P)
            case Dropped(key=key):
                self._over(sender, key.request_id, "lost")
            case StepTokens(tokens):
                for token in tokens:
                    if token.finish is not None:
                        self._over(sender, token.key.request_id, "finished")

    def _over(self, sender: str, name: str, ending: str) -> None:
        """The sender holds nothing of the request any more."""
        self._close(name, sender)
        if not self.clients[name].ending:
            self._end(name, ending)

    def _end(self, name: str, ending: str) -> None:
        client = self.clients[name] = replace(self.clients[name], ending=ending)
        for worker in client.legs:
            if self.processes[worker]:
                self._post(C, worker, FromCoordinator(Cancel(self.cast.size.job(name).key)))

    def _close(self, name: str, worker: str) -> None:
        client = self.clients[name]
        self.clients[name] = replace(client, legs=tuple(leg for leg in client.legs if leg != worker))

    def _lost(self, name: str, gone: PeerGone | LinkLost) -> None:
        """Its requests are lost; a new process takes its name."""
        for client in [client for client, now in self.clients.items() if name in now.legs]:
            self._over(name, client, "lost")
        self.queues[C, name] = ()  # it was for the process that died
        self._begin_life(name)
        if name == D:
            self.last_fence = 0
        peer = other(name)
        self._post(C, peer, gone)
        self._post(C, peer, PeerLinked(name, self._life(name), "memory"))
        self._post(C, name, PeerLinked(peer, self._life(peer), "memory"))

    def _delivered(self, sender: str, message: StepTokens) -> None:
        for token in message.tokens:
            name = token.key.request_id
            client = self.clients[name]
            if sender in client.legs and not client.ending:
                if token.index != client.num_tokens:
                    raise Broken(f"token {token.index} of {name} comes where {client.num_tokens} is due")
                self.clients[name] = replace(client, num_tokens=client.num_tokens + 1)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, name: str, event: Event) -> None:
        """The core takes the event as its shell would give it, and plans the next step if none runs."""
        process = self._process(name)
        may_step = process.step is None and not process.ended
        reaction = self.cast.brains[name].react(process.state, event, process.now, may_step)
        self._reacted(name, reaction, may_step)

    def _reacted(self, name: str, reaction: Reaction, may_step: bool) -> None:
        process = self._process(name)
        if may_step:
            process = replace(process, step=reaction.step, step_link=self.linked_life if name == P else "")
        self.processes[name] = replace(process, state=reaction.state, ahead=reaction.ahead)
        for command in reaction.commands:
            self._carry_out(name, command)

    def _carry_out(self, name: str, command: Command) -> None:
        match command:
            case SendCoordinator(message):
                self._tell_coordinator(name, message)
            case SendPeer(worker_id, incarnation, message):
                if self.processes[worker_id] and self._life(worker_id) == incarnation:
                    self._post(name, worker_id, FromPeer(name, self._life(name), message))
            case Push(push):
                self._push(push, self.linked_life)
            case FinishPush(fence, _, source_blocks):
                if self._reaches_decode(self.linked_life):
                    self.finishing[fence] = len(source_blocks)
                    self._answer_finished()
                else:
                    self._answer_later(P, PushFailed(fence, "decode is gone"))
            case StopPush(fence):
                self._answer_later(P, PushStopped(fence))
            case PostReceive(fence, _, _, block_ids):
                self.missing[fence] = block_ids
            case CancelReceive(fence):
                self.missing.pop(fence, None)
                self.verifying.pop(fence, None)
                self._answer_later(D, ReceiveCancelled(fence))
            case Verify(manifest):
                self.verifying[manifest.fence] = self.cast.things.number(manifest)
                self._answer_verified(manifest.fence)

    def _tell_coordinator(self, name: str, message: Message) -> None:
        match message:
            case PrefillReport():
                return
            case StepTokens(tokens):
                self._delivered(name, message)
                if not any(token.finish for token in tokens):
                    return
            case Granted():
                self._look_at_grant(message)
        self._post(name, C, message)


_MAKE: dict[str, Callable[..., None]] = {
    "deliver": Cluster._deliver,
    "step": Cluster._step,
    "ended": Cluster._ended,
    "answer": Cluster._answer,
    "read": Cluster._read,
    "land": Cluster._land,
    "start": Cluster._start,
    "cancel": Cluster._cancel,
    "kill": Cluster._kill,
    "lose": Cluster._lose,
    "freeze": Cluster._freeze,
    "die": Cluster._die,
    "expire": Cluster._expire,
}


def _forwarded(grant: Granted, decode_life: str) -> PushTo:
    return PushTo(grant.key, D, decode_life, grant.fence, grant.block_ids, grant.num_cached_blocks)
