"""A worker process: a real core, and a shell in virtual time that carries out what it says."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.colocated_pool.hybrid import HybridCore, HybridDecodeCore, HybridPrefillCore
from twinpool.config import Role, SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.errors import InvariantViolation
from twinpool.messages import (
    Denied,
    Granted,
    Heartbeat,
    Left,
    Message,
    PeerInfo,
    Peers,
    Register,
    StartAnew,
    Stop,
    TakeRole,
    Welcome,
)
from twinpool.metrics import WorkerMetric
from twinpool.prefill_pool.core import PrefillCore
from twinpool.worker import role_change
from twinpool.worker.core import (
    BlockPush,
    CancelReceive,
    Command,
    Event,
    FinishPush,
    FromCoordinator,
    FromPeer,
    LinkLost,
    PeerGone,
    PeerLinked,
    PlanAhead,
    PostReceive,
    Push,
    PushFailed,
    PushStopped,
    SendCoordinator,
    SendPeer,
    StepDone,
    StepPlan,
    StopPush,
    Tick,
    Verify,
)
from twinpool.worker.role_change import EMPTY_WITHIN_S, RoleChange
from world import hybrid
from world.auditor import Auditor, Core
from world.links import Links
from world.model import FakeKV, layout
from world.schedule import Actor, Schedule
from world.story import Broken
from world.wire import Receiver, Wire

if TYPE_CHECKING:
    from world.world import World

FINGERPRINT = "fake-model"
TICK_S = 0.1
REGISTER_AGAIN_S = 1.0
MAX_DRIFT = 0.01

Identity = tuple[str, str]
"""A worker's id and incarnation."""


class WorkerProcess(Actor):
    """One process in one role; the `past` one is the same process in the other. No two clocks agree: its own shows
    another time than the world's, and goes at another rate."""

    def __init__(
        self, world: World, role: Role, worker_id: str, number: int, past: WorkerProcess | None = None
    ) -> None:
        super().__init__(f"{worker_id}/{number}")
        self._world = world
        self.role = role
        self.pid = number
        self.identity: Identity = (worker_id, f"life-{number}")
        self._clock_offset_s = world.random.uniform(0.0, 1000.0)
        self._clock_rate = world.random.uniform(1 - MAX_DRIFT, 1 + MAX_DRIFT)
        self.config: SchedulerConfig = world.scenario.workers
        num_blocks, block_size = world.scenario.num_blocks, world.scenario.block_size
        self.core = _core(role, num_blocks, block_size, self.config, self.identity[1])
        self.kv = FakeKV(num_blocks, block_size)
        self.auditor = Auditor(self.name, self.core, self.config, block_size)
        self._succeeds = ""
        if past is not None:
            self._succeeds, self.pid, self.kv = past.identity[1], past.pid, past.kv
            self.core.pool.inherit(past.core.pool)
        self._change: RoleChange | None = None
        self.receiver = Receiver(self, world.scenario.is_one_sided, self.auditor.is_lent)
        self.links = Links(world, self)
        self.is_welcomed = False
        self.has_another_role = False
        self._is_stepping = False
        self._ahead: PlanAhead | None = None
        self._heard_at = 0.0

    @property
    def schedule(self) -> Schedule:
        """The world's time."""
        return self._world.schedule

    @property
    def random(self) -> Random:
        """The world's dice."""
        return self._world.random

    def begin(self) -> None:
        """The process runs: it registers, and its clock ticks."""
        if isinstance(self.core, HybridCore) and (pace := self._world.scenario.pace):
            for timed in hybrid.timed_steps(pace, self.random):
                self.core.handle(timed, self._clock())
        self._keep_registered()
        self._tick()

    def handle(self, event: Event) -> None:
        """Feeds the core and carries out its commands. The core's books are checked after every event."""
        self._world.story.tell(self.schedule.now, self.name, event)
        try:
            commands = self.core.handle(event, self._clock())
            self.core.check()
        except InvariantViolation as exc:
            raise Broken("the core's own books", f"{self.name} at {event}: {exc}") from exc
        self.auditor.check_pins(self.kv.pinned)
        for command in commands:
            self._carry_out(command)
        self._start_step()

    def later(self, action: Callable[[], None]) -> None:
        """`action` happens here after a moment."""
        self.schedule.after(self.random.uniform(0.0, 0.004), self, action)

    def take_later(self, event: Event) -> None:
        """The core gets `event` after a moment."""
        self.later(lambda: self.handle(event))

    def freeze(self, seconds: float) -> None:
        """Stands still for so long."""
        self._world.freeze(self, seconds)

    def leave(self, reason: str) -> None:
        """Stops in order."""
        self._world.network.to_coordinator(self, Left(reason))
        self._world.kill(self, "left")

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────

    def _clock(self) -> float:
        return self.schedule.now * self._clock_rate + self._clock_offset_s

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """`action` happens in so many seconds of this process's clock."""
        self.schedule.after(seconds / self._clock_rate, self, action)

    def _tick(self) -> None:
        for peer in self.links.departed():
            self.handle(PeerGone(*peer))
        self.handle(Tick())
        self._leave_when_empty()
        self._after(TICK_S, self._tick)

    def _leave_when_empty(self) -> None:
        if (change := self._change) is None or not self.is_alive:
            return
        if not self._is_stepping and role_change.holds_nothing(self.core.stats()):
            if self.links.is_busy:
                raise Broken("who holds nothing sends nothing", f"{self.name} becomes {change.role}")
            self._world.network.to_coordinator(self, Left(f"becomes a {change.role} worker"))
            self._world.change_role(self, change.role)
        elif self._clock() > change.until:
            self._world.kept[self.identity[0]] = change.role
            self._world.kill(self, "is not empty in time")

    def _keep_registered(self) -> None:
        if not self.is_welcomed:
            scenario = self._world.scenario
            offer = Register(
                worker_id=self.identity[0],
                incarnation=self.identity[1],
                role=self.role,
                pid=self.pid,
                endpoint=f"memory://{self.name}",
                fingerprint=FINGERPRINT,
                layout=layout(scenario.block_size),
                num_blocks=scenario.num_blocks,
                max_model_len=scenario.num_blocks * scenario.block_size,
                max_num_seqs=self.config.max_num_seqs,
                itl_budget_s=self.config.itl_budget_ms / 1e3 if isinstance(self.core, HybridCore) else None,
                succeeds=self._succeeds,
                fixed_role="a hybrid" if isinstance(self.core, HybridCore) else "",
            )
            self._world.network.to_coordinator(self, offer)
            self._after(REGISTER_AGAIN_S, self._keep_registered)

    def _beat(self, every_s: float) -> None:
        self._world.network.to_coordinator(self, Heartbeat(self.core.stats()))
        self._after(every_s, lambda: self._beat(every_s))

    # ── the model ───────────────────────────────────────────────────────────────────────────────────────────

    def _start_step(self) -> None:
        if not self.is_alive:
            return
        self.auditor.check_slots()
        running = self.auditor.running()
        try:
            plan = None if self._is_stepping else self.core.next_step(self._clock())
            if self._is_stepping or plan is not None:
                self._ahead = self.core.plan_ahead()
            self.core.check()
        except InvariantViolation as exc:
            raise Broken("the core's own books", f"{self.name} at planning: {exc}") from exc
        self.auditor.check_oldest(running)
        if plan is not None:
            self._is_stepping = True
            self._run_step(plan)
        for command in self.core.flush():
            self._carry_out(command)

    def _run_step(self, plan: StepPlan) -> None:
        self._world.story.tell(self.schedule.now, self.name, plan)
        self.auditor.check_headroom(plan)
        wires = [self.links.senders.get(push.worker_id) for push in plan.pushes]
        seconds = self._step_s(plan)
        self.schedule.after(seconds, self, lambda: self._end_step(plan, wires, seconds))

    def _step_s(self, plan: StepPlan) -> float:
        if (pace := self._world.scenario.pace) is None:
            return self._world.step_s()
        running, num_tokens = set(self.auditor.running()), plan.batch.num_tokens
        num_streams = sum(chunk.key in running for chunk in plan.batch.slices)
        seconds = hybrid.step_s(pace, num_streams, num_tokens - num_streams, self.random)
        if isinstance(self.core, HybridCore):
            budget_s = self.config.itl_budget_ms / 1e3
            hybrid.check_step(self.role is Role.DECODE, num_streams, num_tokens, budget_s, seconds)
        return seconds

    def _end_step(self, plan: StepPlan, wires: list[Wire | None], seconds: float) -> None:
        # Written as late as possible: a block that changed hands during the step would be spoiled.
        output = self.kv.run(plan.batch, seconds)
        failed = [
            push.fence
            for push, wire in zip(plan.pushes, wires, strict=True)
            if not self.links.push(push, wire)
        ]
        following = self._ahead.resolve(plan, output) if self._ahead is not None else None
        done = StepDone(plan, output, following)
        if following is not None:
            self._run_step(following)
        # The event loop may be so late that the next step has ended too; but it hears of both in order.
        self._heard_at = max(
            self._heard_at, self.schedule.now + self.random.choice(self._world.scenario.hears_after_s)
        )
        self.schedule.at(self._heard_at, self, lambda: self._step_ended(done, failed))

    def _step_ended(self, done: StepDone, failed: list[int]) -> None:
        for fence in dict.fromkeys(failed):
            self.links.notice_losses()
            self.handle(PushFailed(fence, "the link is lost"))
        self._is_stepping = done.following is not None
        self.handle(done)

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, command: Command) -> None:
        self._world.story.tell(self.schedule.now, self.name, command)
        match command:
            case SendCoordinator(message):
                if isinstance(message, Granted):
                    self.auditor.check_grant(message)
                self._world.network.to_coordinator(self, message)
            case SendPeer(worker_id, incarnation, message):
                self._world.network.to_peer(self, (worker_id, incarnation), message)
            case Push(push):
                self.later(lambda: self._push(push))
            case FinishPush():
                # Behind the pushes that were asked for before.
                self.schedule.after(0.005, self, lambda: self._finish(command))
            case StopPush(fence, worker_id):
                self.schedule.after(0.005, self, lambda: self._stop(fence, worker_id))
            case PostReceive(fence, writer, incarnation, block_ids):
                if self.links.is_writer((writer, incarnation)):
                    self.receiver.expect(fence, (writer, incarnation), block_ids)
            case CancelReceive(fence):
                self.receiver.cancel(fence)
            case Verify(manifest, timeout_s):
                self.receiver.verify(manifest, timeout_s)

    def _push(self, push: BlockPush) -> None:
        if not self.links.push(push, self.links.senders.get(push.worker_id)):
            self.links.notice_losses()
            self.handle(PushFailed(push.fence, "the link is lost"))

    def _finish(self, command: FinishPush) -> None:
        if (wire := self.links.senders.get(command.worker_id)) is not None:
            wire.finish(command)
        else:
            self.handle(PushFailed(command.fence, "no link"))

    def _stop(self, fence: int, worker_id: str) -> None:
        if (wire := self.links.senders.get(worker_id)) is not None:
            wire.stop(fence)
        else:
            self.handle(PushStopped(fence))

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────

    def from_coordinator(self, message: Message) -> None:
        """The coordinator says something."""
        match message:
            case Welcome(heartbeat_s):
                if not self.is_welcomed:
                    self.is_welcomed = True
                    self._beat(heartbeat_s)
            case Stop():
                self.leave("the coordinator said so")
            case StartAnew() | Denied():
                self._world.kill(self, type(message).__name__)
            case Peers(peers):
                self._update_peers(peers)
            case TakeRole(role):
                self._change = RoleChange(role, self._clock() + EMPTY_WITHIN_S)
                self._leave_when_empty()
            case _:
                self.handle(FromCoordinator(message))

    def from_peer(self, sender: Identity, message: Message) -> None:
        """Another worker says something."""
        if self.links.hears(sender):
            self.handle(FromPeer(*sender, message))

    def _update_peers(self, peers: tuple[PeerInfo, ...]) -> None:
        gone, new = self.links.replace([(peer.worker_id, peer.incarnation) for peer in peers])
        for peer in gone:
            if self._world.scenario.is_ours and peer in self._world.workers:
                raise Broken(
                    "who counts as lost is ended", f"{peer} counts as gone to {self.name}, but lives"
                )
            self.handle(LinkLost(*peer) if self.links.may_write(peer) else PeerGone(*peer))
        for peer in new:
            self.links.open(peer)

    def linked(self, peer: Identity) -> None:
        """Handshake and probe with that peer have succeeded."""
        self.handle(PeerLinked(*peer, "memory"))

    def what_is_held(self) -> str:
        """What this worker still holds of any request; empty when everything is free."""
        stats = self.core.stats()
        held = [
            f"{name} {count}"
            for name, count in (
                ("blocks", self._world.scenario.num_blocks - stats.free_blocks - stats.cached_blocks),
                ("waiting", stats.waiting),
                ("running", stats.running),
                ("leased", stats.leased_blocks),
                ("quarantined", stats.quarantined_blocks),
                ("pinned", sum(self.kv.pinned.values())),
                ("receives", self.receiver.is_expecting),
                ("wires", self.links.is_busy),
                ("prompt tokens on decode", stats.counters.get(WorkerMetric.DECODE_POOL_PROMPT_TOKENS, 0)),
            )
            if count
        ]
        return f"{self.name}: {', '.join(held)}" if held else ""


def _core(role: Role, num_blocks: int, block_size: int, config: SchedulerConfig, incarnation: str) -> Core:
    match role:
        case Role.PREFILL if config.hybrid:
            return HybridPrefillCore(num_blocks, layout(block_size), FINGERPRINT, config)
        case Role.DECODE if config.hybrid:
            return HybridDecodeCore(num_blocks, layout(block_size), FINGERPRINT, config, incarnation)
        case Role.PREFILL:
            return PrefillCore(num_blocks, layout(block_size), FINGERPRINT, config)
        case Role.DECODE:
            return DecodeCore(num_blocks, layout(block_size), FINGERPRINT, config, incarnation)
        case Role.COLOCATED:
            return ColocatedCore(num_blocks, layout(block_size), config)
