"""Carries out what a role's core says: messages, model steps, transfers, time. Decides nothing about requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from twinpool.channel import DealerChannel
from twinpool.config import Role
from twinpool.engine.host_memory import FirstTouch
from twinpool.errors import (
    InvariantViolation,
    NotAMember,
    PeerLost,
    ProtocolError,
    StepStuck,
    StrangerRefused,
    WorkerDenied,
)
from twinpool.junk_log import JunkLog
from twinpool.messages import (
    Denied,
    Dropped,
    Granted,
    Heartbeat,
    Left,
    Message,
    Peers,
    StartAnew,
    Stop,
    TakeRole,
    Welcome,
)
from twinpool.metrics import WorkerMetric
from twinpool.worker.core import (
    Command,
    Event,
    FromCoordinator,
    PushFailed,
    PushFinished,
    SendCoordinator,
    SendPeer,
    StepDone,
    Tick,
    Verified,
)
from twinpool.worker.parts import WorkerParts
from twinpool.worker.peer_links import PeerLinks
from twinpool.worker.preparation import Preparation
from twinpool.worker.progress import Progress
from twinpool.worker.role_change import CHANGEABLE, EMPTY_WITHIN_S, RoleChange, holds_nothing
from twinpool.worker.step_thread import StepResult, StepThread
from twinpool.worker.transfers import Transfers
from twinpool.worker.vigil import Vigil

log = logging.getLogger(__name__)

TICK_S = 0.05
REGISTER_AGAIN_S = 2.0
NO_ANSWER_S = 4.0
"""A coordinator that is silent for so long is worth a warning, and again each time that this has doubled."""


class WorkerShell:
    """One worker in one role, on the running event loop."""

    def __init__(self, parts: WorkerParts) -> None:
        self._core = parts.core
        self._on_silence = parts.on_silence
        self._change: RoleChange | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._welcomed = False
        self._stepping = False
        self._progress = Progress(self._loop.time())
        self._strict = parts.settings.strict
        self._step_timeout_s = parts.step_timeout_s
        self._vigil = Vigil(parts.link.coordinator, parts.step_timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._junk_log = JunkLog(log)
        self._links = PeerLinks(parts, self._handle, self._tell_coordinator, self._junk, self._spawn)
        self._register = msgspec.structs.replace(parts.register, endpoint=self._links.endpoint)
        senders = self._links.senders
        self._steps = StepThread(parts.runner, parts.pool.region.layout.num_layers, senders, self._step_ended)
        self._preparation = Preparation(
            parts.runner.grammars,
            lambda message: self._handle(FromCoordinator(message)),
            FirstTouch(parts.pool.region.memory).go_on,
            has_streams=self._register.generates,
        )
        self._transfers = Transfers(
            parts.pool, self._steps, senders, self._links.incoming, self._handle, self._spawn
        )
        self._address = parts.link.coordinator
        self._coordinator = DealerChannel(
            parts.link.coordinator,
            parts.settings.end.writer,
            parts.link.join_token,
            self._from_coordinator,
            self._junk,
        )

    @property
    def next_role(self) -> Role | None:
        """The role that the process is to have when this one has ended; None: it is to have none."""
        return None if self._change is None else self._change.role

    def stop(self, reason: str) -> None:
        """Ends `run` soon. Call it on the event loop; calling it twice is fine."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def run(self) -> str:
        """Works until told to stop, or to take another role (`next_role`); returns why it did.

        Raises:
            WorkerDenied: the coordinator refused; the message says why.
            NotAMember: the coordinator has given this process up, is another one than it joined, or may have missed
                some of its messages.
            StepStuck: a step has run for `step_timeout_s`. Nothing is closed: the process must end at once.
            InvariantViolation: a rule of the core was broken. The process must end: its state is not to be trusted,
                and the coordinator resumes elsewhere what it held.
        """
        for timer in (self._keep_registered(), self._tick()):
            self._spawn(timer)
        try:
            reason = await self._ended
        except StepStuck:
            raise
        except BaseException:
            await self._close()
            raise
        await self._close(Left(reason))
        return reason

    async def _close(self, farewell: Left | None = None) -> None:
        """Ends all work, and only then tells the coordinator `farewell`: others rely on it that from then on nothing
        comes from this process, and that it writes nowhere."""
        for task in self._tasks:
            task.cancel()
        self._preparation.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(self._step_timeout_s):
                await asyncio.to_thread(self._steps.close)
        except TimeoutError as exc:
            raise self._vigil.stuck() from exc
        await self._links.close()
        self._on_silence()
        if farewell is not None:
            self._tell_coordinator(farewell)
        self._coordinator.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(exc)
        else:
            log.error("while stopping", exc_info=exc)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_registered(self) -> None:
        silent_s, told_at_s = 0.0, NO_ANSWER_S
        while not self._welcomed:
            self._tell_coordinator(self._register)
            await asyncio.sleep(REGISTER_AGAIN_S)
            silent_s += REGISTER_AGAIN_S
            if silent_s >= told_at_s and not self._welcomed:
                told_at_s *= 2
                log.warning(
                    "no coordinator answers at %s for %.0f s; is `twinpool serve` running with that --control address?",
                    self._address, silent_s,
                )  # fmt: skip

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._links.notice_deaths()
            self._handle(Tick())
            self._leave_when_empty()
            stats = self._core.stats()
            self._progress.look(self._loop.time(), stats.waiting > 0)
            is_idle = self._welcomed and not (self._stepping or stats.waiting or stats.running)
            self._preparation.look(self._loop.time(), is_idle=is_idle)
            verdict = self._vigil.verdict(
                self._coordinator.num_refused, self._coordinator.num_broken, self._progress.step_s
            )
            if verdict is not None:
                self._fail(verdict)

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._links.count_into(self._core.counters)
            stats = msgspec.structs.replace(self._core.stats(), stalled_s=self._progress.stalled_s)
            self._tell_coordinator(Heartbeat(stats))

    # ── the core ──────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, event: Event) -> None:
        if self._ended.done():
            return
        if isinstance(event, PushFailed):
            self._links.notice_losses()
        try:
            if isinstance(event, (PushFinished, Verified)):
                self._progress.moved()
            for command in self._core.handle(event, self._loop.time()):
                self._carry_out(command)
            self._start_step()
        except Exception as exc:  # noqa: BLE001  # whatever it is, the core is half way and not to be trusted
            if isinstance(exc, InvariantViolation):
                self._core.counters.add(WorkerMetric.INVARIANT_VIOLATIONS)
            self._fail(exc)

    def _carry_out(self, command: Command) -> None:
        match command:
            case SendCoordinator(message):
                match message:
                    case Granted():
                        self._progress.moved()
                    case Dropped(key):
                        self._preparation.left(key)
                self._tell_coordinator(message)
            case SendPeer(worker_id, incarnation, message):
                self._links.send(worker_id, incarnation, message)
            case _:
                self._transfers.carry_out(command)

    def _start_step(self) -> None:
        if not self._stepping:
            if (plan := self._core.next_step(self._loop.time())) is not None:
                self._stepping = True
                self._progress.step_began()
                self._spawn(self._steps.run(plan))
            for command in self._core.flush():
                self._carry_out(command)
        if self._stepping:
            self._steps.offer(self._core.plan_ahead())

    def _step_ended(self, result: StepResult) -> None:
        for fence, reason in result.failed.items():
            self._handle(PushFailed(fence, reason))
        self._progress.step_ended()
        self._core.counters.add(WorkerMetric.STEP_CPU_SECONDS, result.output.cpu_s)
        if result.output.missed_graph:
            self._missed_graph(len(result.plan.batch.slices))
        self._stepping = result.following is not None
        if self._stepping:
            self._progress.step_began()
        self._handle(StepDone(result.plan, result.output, result.following))

    def _missed_graph(self, num_sequences: int) -> None:
        words = f"a decode step of {num_sequences} sequences ran kernel by kernel: no CUDA graph of it was captured"
        if self._strict:
            self._fail(InvariantViolation(f"--strict: {words}"))
        elif not self._core.counters[WorkerMetric.MISSED_GRAPHS]:
            log.warning("%s; steps like it are counted", words)
        self._core.counters.add(WorkerMetric.MISSED_GRAPHS)

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────

    def _from_coordinator(self, _: str, message: Message) -> None:
        if self._ended.done():
            return
        match message:
            case Welcome(heartbeat_s):
                if not self._welcomed:  # each Register that was on its way is answered
                    self._welcomed = True
                    self._vigil.welcomed(self._coordinator.num_broken)
                    log.info("joined %s", self._address)
                    self._spawn(self._beat(heartbeat_s))
            case Denied(reason):
                self._fail(WorkerDenied(reason))
            case Stop():
                self._change = None  # it ends, in whatever role
                self.stop("the coordinator said so")
            case StartAnew():
                self._fail(NotAMember("the coordinator does not know this process (any more)"))
            case TakeRole(role):
                self._take_role(role)
            case Peers(peers):
                self._links.update(peers)
            case _:
                self._preparation.take(message)

    def _take_role(self, role: Role) -> None:
        if {role, self._register.role} != CHANGEABLE:
            self._junk("", ProtocolError(f"a {self._register.role} worker was told to become {role}"))
        elif self._change is None:
            self._change = RoleChange(role, self._loop.time() + EMPTY_WITHIN_S)
            self._leave_when_empty()

    def _leave_when_empty(self) -> None:
        if (change := self._change) is None or self._ended.done():
            return
        if not self._stepping and holds_nothing(self._core.stats()):
            self.stop(f"becomes a {change.role} worker")
        elif self._loop.time() > change.until:
            self._fail(
                NotAMember(
                    f"after {EMPTY_WITHIN_S:g} s not all blocks of the {self._register.role} role are free"
                )
            )

    def _junk(self, identity: str, error: ProtocolError) -> None:
        is_stranger = isinstance(error, StrangerRefused)
        self._core.counters.add(WorkerMetric.STRANGERS if is_stranger else WorkerMetric.JUNK_MESSAGES)
        self._junk_log.say(str(error) if is_stranger else f"from {identity or 'the coordinator'}: {error}")

    def _tell_coordinator(self, message: Message) -> None:
        try:
            self._coordinator.send(message)
        except PeerLost as exc:
            self._fail(NotAMember(f"the coordinator takes no messages: {exc}"))
