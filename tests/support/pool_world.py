"""Worker cores of all roles, wired by messages in memory, with a fake model and a virtual clock.

Everything that a network, a transport or a step thread may delay lies in a queue; each turn takes the head of
one, chosen by a seeded generator. So messages of one connection keep their order; all else may overtake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

from support.fake_coordinator import Client, FakeCoordinator, Identity
from support.fake_model import FakeKV, digest
from support.fake_wire import Receiver, Wire
from twinpool.colocated_pool.core import ColocatedCore
from twinpool.config import Role, SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import Message, decode, encode
from twinpool.prefill_pool.core import PrefillCore
from twinpool.request import Job
from twinpool.worker.core import (
    CancelReceive,
    Command,
    Event,
    FinishPush,
    FromCoordinator,
    FromPeer,
    PeerGone,
    PeerLinked,
    PostReceive,
    Push,
    ReceiveCancelled,
    SendCoordinator,
    SendPeer,
    StepDone,
    StepPlan,
    StopPush,
    Tick,
    Verified,
    Verify,
)

FINGERPRINT = "fake-model"
STEP_S = 0.02
TURN_S = 0.001
TICK_S = 0.1
MANY_QUIET_TURNS = 50
MAX_QUIET_TURNS = 5_000

Core = PrefillCore | DecodeCore | ColocatedCore
Delivery = Callable[[], None]


def layout(block_size: int) -> KVLayout:
    """The layout of the fake model's KV."""
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype=Dtype.FLOAT32)


class Worker:
    """One process: a core, and a shell that carries out what it says."""

    def __init__(
        self, world: World, role: Role, index: int, num_blocks: int, config: SchedulerConfig
    ) -> None:
        self.world = world
        self.role = role
        self.index = index
        self.incarnation = f"life-{world.next_life()}"
        shape, incarnation = layout(world.block_size), self.incarnation
        self.core: Core
        match role:
            case Role.PREFILL:
                self.core = PrefillCore(num_blocks, shape, FINGERPRINT, config)
            case Role.DECODE:
                self.core = DecodeCore(num_blocks, shape, FINGERPRINT, config, incarnation)
            case Role.COLOCATED:
                self.core = ColocatedCore(num_blocks, shape, config)
        self.kv = FakeKV(num_blocks, world.block_size)
        self.receiver = Receiver(self.kv, world.is_one_sided)
        self.wires: dict[Identity, Wire] = {}
        self.has_news = False
        self.is_stepping = False

    @property
    def identity(self) -> Identity:
        """Its id and incarnation."""
        return f"{self.role}-{self.index}", self.incarnation

    def take(self, event: Event) -> None:
        """Feeds the core and carries out its commands. The core's books are checked after every event."""
        commands = self.core.handle(event, self.world.now)
        self.core.check()
        self.has_news = True
        for command in commands:
            self._carry_out(command)

    def start_step(self) -> bool:
        """Asks for a plan, whose result lies in a queue until the step is over; False if there is none."""
        plan = self.core.next_step(self.world.now)
        self.core.check()
        self.has_news = plan is not None
        if plan is not None:
            self.is_stepping = True
            wires = [self._wire_to(push.worker_id) for push in plan.pushes]
            self.world.post((self.identity, "step"), lambda: self._end_step(plan, wires))
        return plan is not None

    def _end_step(self, plan: StepPlan, wires: list[Wire]) -> None:
        # Written as late as possible: a block that changed hands during the step would be spoiled.
        output = self.kv.run(plan.batch, STEP_S)
        for push, wire in zip(plan.pushes, wires, strict=True):
            wire.push(push)
        self.is_stepping = False
        self.take(StepDone(plan, output))

    def _carry_out(self, command: Command) -> None:
        match command:
            case SendCoordinator(message):
                self.world.to_coordinator(self.identity, message)
            case SendPeer(worker_id, incarnation, message):
                self.world.to_peer(self.identity, (worker_id, incarnation), message)
            case Push(push):
                self._wire_to(push.worker_id).push(push)
            case FinishPush():
                self._wire_to(command.worker_id).finish(command)
            case StopPush(fence, worker_id):
                self._wire_to(worker_id).stop(fence)
            case PostReceive(fence, _, _, block_ids):
                self.receiver.expect(fence, block_ids)
            case CancelReceive(fence):
                self.receiver.cancel(fence)
                self._take_later(ReceiveCancelled(fence))
            case Verify(manifest, timeout_s):
                self.receiver.verify(manifest, self.world.now + timeout_s)

    def _wire_to(self, worker_id: str) -> Wire:
        return next(wire for peer, wire in reversed(self.wires.items()) if peer[0] == worker_id)

    def _later(self, call: Delivery) -> None:
        self.world.post((self.identity, "transfer"), call)

    def _take_later(self, event: Event) -> None:
        self._later(lambda: self.take(event))

    def link(self, decode_worker: Worker) -> None:
        """Handshake and probe with a decode worker have succeeded."""
        self.wires[decode_worker.identity] = Wire(self.kv, decode_worker.receiver, self._later, self.take)
        decode_worker.take(PeerLinked(*self.identity, "memory"))
        self.take(PeerLinked(*decode_worker.identity, "memory"))

    def answer_verifications(self) -> None:
        """Answers those that can be answered now."""
        for manifest, is_late in self.receiver.due(self.world.now):
            arrived = tuple(digest(self.kv.read(block)) for block in manifest.block_ids)
            error = "" if arrived == manifest.digests else "a digest differs"
            self._take_later(Verified(manifest.fence, 0.0, "bytes are missing" if is_late else error))


class World:
    """A deployment. `num_workers` gives the workers of each role; all have equal pools and settings."""

    def __init__(
        self,
        seed: int,
        num_workers: dict[Role, int],
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        config: SchedulerConfig | None = None,
        is_one_sided: bool = True,
    ) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.block_size = block_size
        self.is_one_sided = is_one_sided
        self.num_to_lose = 0
        self._lives = 0
        self._ticked_at = 0.0
        self._num_blocks = num_blocks
        self._config = config or SchedulerConfig(token_budget=16, headroom_tokens=4)
        self._queues: dict[tuple[object, ...], deque[Delivery]] = {}
        self.workers: dict[Identity, Worker] = {}
        self._frozen: set[Identity] = set()
        num_decoding = num_workers.get(Role.DECODE, 0) + num_workers.get(Role.COLOCATED, 0)
        max_in_flight = 2 * num_decoding * self._config.max_num_seqs
        self.coordinator = FakeCoordinator(self._to_worker, self._choose, max_in_flight)
        for role, count in num_workers.items():
            for index in range(count):
                self._start_worker(role, index)
        for worker in self.workers.values():
            for other in self.workers.values():
                self._link(worker, other)

    # ── what tests do ─────────────────────────────────────────────────────────────────────────────────────

    def submit(self, job: Job) -> Client:
        """A request arrives."""
        return self.coordinator.submit(job)

    def cancel(self, client: Client) -> None:
        """Its client leaves."""
        self.coordinator.cancel(client)

    def kill(self, worker: Worker) -> None:
        """The process dies at once; everybody hears of it in time, and then of the new one in its place."""
        del self.workers[worker.identity]
        for key in [key for key in self._queues if key[0] == worker.identity]:
            del self._queues[key]
        heir = self._start_worker(worker.role, worker.index)
        self.post(("coordinator", "peers"), lambda: self.coordinator.worker_gone(worker.identity))
        for other in self.workers.values():
            if wire := other.wires.get(worker.identity):
                wire.break_off()
            if other is not heir:
                self.post((other.identity, "peers"), partial(self._replace_peer, other, worker, heir))

    def freeze(self, worker: Worker) -> None:
        """The process stands still: it hears, says, writes and computes nothing, and nobody is told."""
        self._frozen.add(worker.identity)

    def of_role(self, role: Role) -> list[Worker]:
        """The workers of a role."""
        return [worker for worker in self.workers.values() if worker.role is role]

    def turn(self) -> bool:
        """One thing happens, or nothing can and time passes; False if that changed nothing."""
        self.now += TURN_S
        if self.now - self._ticked_at >= TICK_S:
            self._tick()
        workers = [worker for identity, worker in self.workers.items() if identity not in self._frozen]
        choices: list[Callable[[], bool | None]] = []
        choices += [
            partial(self._deliver, connection)
            for connection in self._queues
            if connection[0] not in self._frozen or connection[1] == "coordinator"
        ]
        choices += [worker.start_step for worker in workers if worker.has_news and not worker.is_stepping]
        wires = [wire for worker in workers for wire in worker.wires.values() if wire.is_busy]
        choices += [partial(wire.move, self.random) for wire in wires]
        if not choices:
            self.now = self._ticked_at + TICK_S
            return False
        return self.random.choice(choices)() is not False

    def run(self, max_turns: int = 100_000) -> None:
        """Turns until every request has ended and nothing moves any more."""
        quiet = 0
        for _ in range(max_turns):
            quiet = 0 if self.turn() else quiet + 1
            if quiet > MANY_QUIET_TURNS and all(c.has_ended for c in self.coordinator.clients.values()):
                return
            assert quiet < MAX_QUIET_TURNS, f"stuck: {self.coordinator.clients}"
        raise AssertionError(f"still busy after {max_turns} turns")

    def wait(self, seconds: float) -> None:
        """Turns until so much time has passed."""
        until = self.now + seconds
        while self.now < until:
            self.turn()

    def assert_everything_is_free(self) -> None:
        """No worker holds anything, and nobody waits for a worker."""
        assert not self.coordinator.open_legs
        for worker in self.workers.values():
            stats = worker.core.stats()
            assert stats.free_blocks + stats.cached_blocks == self._num_blocks, stats
            assert stats.waiting == stats.running == stats.leased_blocks == stats.quarantined_blocks == 0, (
                stats
            )
            assert stats.counters.get("decode_pool_prompt_tokens_total", 0) == 0
            assert not worker.receiver.is_expecting

    # ── the network ───────────────────────────────────────────────────────────────────────────────────────

    def next_life(self) -> int:
        """A number for a new incarnation."""
        self._lives += 1
        return self._lives

    def post(self, connection: tuple[object, ...], delivery: Delivery) -> None:
        """`delivery` happens some time after all others of `connection`, whose first part it dies with."""
        self._queues.setdefault(connection, deque()).append(delivery)

    def to_coordinator(self, sender: Identity, message: Message) -> None:
        """A worker speaks to the coordinator."""
        sent = decode(encode(message))
        self.post((sender, "coordinator"), lambda: self.coordinator.receive(sender, sent))

    def to_peer(self, sender: Identity, receiver: Identity, message: Message) -> None:
        """A worker speaks to another; dropped if that one is gone, or the network loses it."""
        if self.num_to_lose and self.random.random() < 0.3:
            self.num_to_lose -= 1
            return
        sent = decode(encode(message))
        if worker := self.workers.get(receiver):
            self.post((receiver, "from", sender), lambda: worker.take(FromPeer(*sender, sent)))

    def _to_worker(self, receiver: Identity, message: Message) -> None:
        sent = decode(encode(message))
        if worker := self.workers.get(receiver):
            self.post((receiver, "from coordinator"), lambda: worker.take(FromCoordinator(sent)))

    def _choose(self) -> tuple[Identity, ...]:
        single = [(worker.identity,) for worker in self.of_role(Role.COLOCATED)]
        pairs = [
            (worker.identity, peer)
            for worker in self.of_role(Role.PREFILL)
            for peer in worker.wires
            if peer in self.workers
        ]
        return self.random.choice(single + pairs) if single or pairs else ()

    def _start_worker(self, role: Role, index: int) -> Worker:
        worker = Worker(self, role, index, self._num_blocks, self._config)
        self.workers[worker.identity] = worker
        return worker

    def _link(self, worker: Worker, other: Worker) -> None:
        """Handshake and probe succeed, if these two exchange KV."""
        roles = (worker.role, other.role)
        if roles == (Role.PREFILL, Role.DECODE) and other.identity not in worker.wires:
            worker.link(other)

    def _replace_peer(self, worker: Worker, peer: Worker, heir: Worker) -> None:
        self._queues.pop((worker.identity, "from", peer.identity), None)  # nothing comes from it any more
        worker.take(PeerGone(*peer.identity))
        if self.workers.get(heir.identity) is heir:
            self._link(worker, heir)
            self._link(heir, worker)
            self.coordinator.start_waiting()

    def _deliver(self, connection: tuple[object, ...]) -> None:
        queue = self._queues[connection]
        delivery = queue.popleft()
        if not queue:
            del self._queues[connection]
        delivery()

    def _tick(self) -> None:
        self._ticked_at = self.now
        for worker in [w for identity, w in self.workers.items() if identity not in self._frozen]:
            worker.answer_verifications()
            worker.take(Tick())
