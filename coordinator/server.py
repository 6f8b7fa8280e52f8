"""The shell around the coordinator's core: sockets, the clock, timers, and a stream per request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from twinpool.channel import RouterChannel
from twinpool.clock import Clock, MonotonicClock
from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import (
    Abandoned,
    Agree,
    Arrived,
    Cancelled,
    Command,
    Completed,
    Cut,
    Decline,
    Delivered,
    Drain,
    Emit,
    EndProcess,
    Event,
    FromWorker,
    Knocked,
    Note,
    PoolGivenUp,
    Reassign,
    Record,
    Refuse,
    Retire,
    Send,
    Shutdown,
    StartWorker,
    Tick,
    WorkerLost,
)
from twinpool.coordinator.exposition import Exposition
from twinpool.coordinator.pool_desk import PoolDesk
from twinpool.coordinator.record_file import RequestRecorder, start_recorder
from twinpool.coordinator.scaler import Member
from twinpool.coordinator.service import Output, RequestFacts, Submission, Take
from twinpool.coordinator.state import CoordinatorCore
from twinpool.coordinator.streams import OutputStream
from twinpool.coordinator.tenants import Allowances, Tenant
from twinpool.coordinator.timeline import Timeline
from twinpool.coordinator.tuning import Tuner, WorkerTerms, worker_terms
from twinpool.coordinator.vital import OnFailure, start_vital
from twinpool.errors import (
    InvariantViolation,
    NoWorker,
    PeerLost,
    ProtocolError,
    RequestError,
    RequestFailed,
    StrangerRefused,
    TwinpoolError,
    UnknownRequest,
)
from twinpool.junk_log import JunkLog
from twinpool.messages import Message
from twinpool.metrics import WorkerMetric

TICK_S = 0.1
LATE_TICK_S = 0.5
LEAVE_GRACE_S = 3.0
BUGS = (InvariantViolation, AttributeError, LookupError, TypeError, ValueError)
"""What a bug of ours raises. It is counted and logged; timers, leases and all other requests go on."""

log = logging.getLogger(__name__)


class Coordinator:
    """One coordinator: the `Service` behind the gateway, and the workers' control endpoint.

    `eos_token_ids` are the tokens that end an answer of the served model. `end_process(worker_id, pid)` kills that
    process if it is one that this server started; it does not wait. `on_failure` is called if the timer fails:
    the server must end then, for no lease or deadline does. `tuner` hears of requests. All methods are called on the
    event loop that ran `start`.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        eos_token_ids: tuple[int, ...],
        clock: Clock | None = None,
        end_process: Callable[[str, int], None] | None = None,
        *,
        on_failure: OnFailure,
        tuner: Tuner | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._end_process = end_process
        self._on_failure = on_failure
        self._tuner = tuner
        self._core = CoordinatorCore(config, eos_token_ids)
        self._own_counts: Counter[WorkerMetric] = Counter()
        self._junk_log = JunkLog(log)
        self._exposition = Exposition(self._core, self._own_counts, self.now)
        self.pool_desk = PoolDesk(self._core.registry, self._handle, self.now)
        self._exposition.tuner = self.pool_desk.tuner = tuner
        self._recorder: RequestRecorder | None = None
        self._streams: dict[str, OutputStream] = {}
        self._refusals: dict[str, RequestError] = {}
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._is_stopping = False
        self._channel: RouterChannel | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._handled = asyncio.Event()

    # ── life of the server ──────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Opens the control endpoint and starts the timer.

        Raises:
            ConfigError: the control address cannot be bound, or the record cannot be written.
        """
        if self._config.record is not None:
            self._recorder = self._exposition.recorder = start_recorder(self._config.record, self.now())
        self._channel = RouterChannel(
            self._config.control, self._config.join_token, self._on_message, self._on_junk
        )
        self._ticker = start_vital(self._tick(), "no lease or deadline would end any more", self._on_failure)

    @property
    def endpoint(self) -> str:
        """Where workers connect. Raises TwinpoolError before `start`."""
        if self._channel is None:
            raise TwinpoolError("the coordinator has no endpoint before start()")
        return self._channel.endpoint

    async def drain_and_stop(self) -> None:
        """Admits nothing more, lets running requests end for at most `drain_s`, then stops the workers and itself.

        What is not complete by then ends with a timeout in its stream. Cancelling this skips the waits,
        nothing else. Calling it twice is fine.
        """
        if self._is_stopping or self._channel is None:
            return
        self._is_stopping = True
        try:
            self._handle(Drain())
            await self._wait_until(
                "requests still run", lambda: self._core.num_live == 0, self._config.drain_s
            )
        finally:
            self._handle(Shutdown())
            try:
                await self._wait_until(
                    "workers have not said goodbye", lambda: len(self._core.registry) == 0, LEAVE_GRACE_S
                )
            finally:
                if self._ticker is not None:
                    self._ticker.cancel()
                self._channel.close()
                self._close_record()

    def _close_record(self) -> None:
        if self._recorder is not None:
            for ended in self._core.ended(self.now(), settle_s=0.0):
                self._recorder.put(ended)
            self._recorder.close()

    def members(self) -> frozenset[str]:
        """The ids of the workers that have joined."""
        return frozenset(worker.worker_id for worker in self._core.registry)

    def membership(self) -> Mapping[str, Member]:
        """The same, and what a scaler is to know of them."""
        return {
            worker.worker_id: Member(
                worker.role, worker.departure is not None and worker.departure.role is None
            )
            for worker in self._core.registry
        }

    def least_num_blocks(self) -> int | None:
        """The size of the smallest KV pool of a worker that has joined; None before the first has."""
        return min((worker.info.num_blocks for worker in self._core.registry), default=None)

    def worker_terms(self) -> WorkerTerms | None:
        """What workers have alike; None before the first has joined."""
        return worker_terms(self._core.registry)

    def past_num_blocks(self, worker_id: str) -> int | None:
        """How large the KV pool of that worker's last process was, once it is gone; None if it never joined."""
        return self._core.registry.past_num_blocks(worker_id)

    def worker_exited(self, worker_id: str, pid: int, reason: str) -> None:
        """The launcher saw that process end: its requests go on elsewhere at once, not after its lease."""
        worker = self._core.registry.get(worker_id)
        if worker is not None and worker.info.pid == pid:
            self._handle(WorkerLost(worker_id, worker.incarnation, reason))

    def pool_given_up(self, role: Role, reason: str) -> None:
        """Nobody starts workers of this role any more: what waits for them ends at once, unless others have joined."""
        self._handle(PoolGivenUp(role, reason))

    # ── Service ─────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        """The coordinator clock, in seconds."""
        return self._clock.now()

    def submit(self, submission: Submission, take: Take | None = None) -> AsyncIterator[Output]:
        """Admits the request; see `Service.submit`."""
        request_id = submission.request_id
        if self._core.is_live(request_id):
            raise InvariantViolation(f"two requests at once have the id {request_id!r}")
        stream = self._streams[request_id] = OutputStream(take)
        self._handle(Arrived(submission))
        if self._tuner is not None:
            self._tuner.arrived(submission, self._core.prefix(request_id), self.now())
        error = self._refusals.pop(request_id, None)
        if error is None and self._core.timeline(request_id) is not None:
            return stream
        del self._streams[request_id]
        raise error or RequestFailed("the server failed to take the request on, which is a bug in Twinpool")

    def knock(self, request_id: str, tenant: Tenant, priority: int) -> None:
        """Raises if the request would be refused whatever its prompt; see `Service.knock`."""
        self._handle(Knocked(request_id, tenant, priority))
        if (error := self._refusals.pop(request_id, None)) is not None:
            raise error

    def complete(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string ended the answer; see `Service.complete`."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.close()
        self._handle(Completed(request_id, num_output_tokens))

    def abandon(self, request_id: str) -> None:
        """The client has left; see `Service.abandon`."""
        self._handle(Abandoned(request_id))

    def cancel(self, request_id: str, tenant: Tenant) -> None:
        """Its client wants it to end; see `Service.cancel`."""
        self._handle(Cancelled(request_id, tenant.name))
        if (error := self._refusals.pop(request_id, None)) is not None:
            raise error

    def cut(self, request_id: str, error: RequestError) -> None:
        """The gateway gives it up; see `Service.cut`."""
        self._handle(Cut(request_id, error))

    def delivered(self, request_id: str) -> None:
        """The first output was handed to the connection."""
        self._handle(Delivered(request_id))

    def allowances(self, tenant: Tenant) -> Allowances:
        """What is left of the tenant's quotas."""
        return self._core.accounts.allowances(tenant, self.now())

    def facts(self, request_id: str) -> RequestFacts:
        """What became of a running or recent request. Raises UnknownRequest."""
        return self._known(request_id).facts(self.now(), self._core.block_size)

    def timeline(self, request_id: str) -> Mapping[str, Any]:
        """The stages of a running or recent request. Raises UnknownRequest."""
        return self._known(request_id).to_json(self.now())

    def _known(self, request_id: str) -> Timeline:
        if (timeline := self._core.timeline(request_id)) is not None:
            return timeline
        raise UnknownRequest(
            f"no request {request_id!r} is known: it never came, was refused, or is not among the last "
            f"{self._config.finished_timelines} that ended"
        )

    def ready(self) -> tuple[bool, str]:
        """Whether every pool has a worker that can execute, and why (not)."""
        return (False, "the server is stopping") if self._is_stopping else self._core.registry.ready()

    def health(self) -> tuple[bool, str]:
        """Whether work that waits makes progress, and a sentence: what stands still."""
        return self._core.health(self.now())

    def metrics_text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return self._exposition.text()

    @property
    def max_model_len(self) -> int:
        """The longest sequence that every worker can hold, in tokens. Raises NoWorker before the first joined."""
        max_model_len = self._core.registry.max_model_len()
        if max_model_len is None:
            raise NoWorker("no worker has registered yet, so the context length is not known")
        return max_model_len

    # ── events and commands ─────────────────────────────────────────────────────────────────────────────────

    def _handle(self, event: Event) -> None:
        """Feeds the core. An event that a command causes (a worker out of reach) waits its turn."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle_one(self._events.popleft())
        finally:
            self._is_handling = False
        self._handled.set()

    def _handle_one(self, event: Event) -> None:
        if isinstance(
            event, Completed
        ):  # not before: outputs that are on their way may have ended the answer
            self._streams.pop(event.request_id, None)
        try:
            commands = self._core.handle(event, self.now())
        except BUGS:
            self._violated(event)
            return
        for command in commands:
            try:
                self._carry_out(command)
            except InvariantViolation:
                self._violated(event)
                if isinstance(command, Emit):
                    self._break_off(command)

    def _violated(self, event: Event) -> None:
        self._own_counts[WorkerMetric.INVARIANT_VIOLATIONS] += 1
        log.exception("a bug in Twinpool, at %s", type(event).__name__)

    def _break_off(self, emit: Emit) -> None:
        """The outputs of that request do not add up, a bug of ours: reader and workers are told that it ends."""
        error = RequestFailed("the server lost track of the answer, which is a bug in Twinpool; try again")
        if (stream := self._streams.get(emit.request_id)) is None:
            return
        stream.break_off(error)
        if emit.output.finish is None:
            self._handle(Cut(emit.request_id, error))
        else:
            del self._streams[emit.request_id]

    def _carry_out(self, command: Command) -> None:
        match command:
            case Emit(request_id, output):
                self._emit(request_id, output)
            case Send(worker_id, incarnation, message):
                self._send(worker_id, incarnation, message)
            case EndProcess(worker_id, pid):
                if self._end_process is not None:
                    self._end_process(worker_id, pid)
            case Record(ended):
                if self._recorder is not None:
                    self._recorder.put(ended)
                if self._tuner is not None:
                    self._tuner.ended(ended, self.now())
            case Refuse(request_id, error):
                self._refusals[request_id] = error
            case Agree() | Decline() | StartWorker() | Reassign() | Retire():
                self.pool_desk.carry_out(command)
            case Note(text, is_fault):
                log.log(logging.ERROR if is_fault else logging.INFO, "%s", text)

    def _emit(self, request_id: str, output: Output) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            raise InvariantViolation(f"an output for {request_id}, which nobody reads")
        stream.put(output)
        if self._tuner is not None and output.token_ids:
            self._tuner.emitted(request_id, len(output.token_ids), self.now())
        if output.finish is not None:
            del self._streams[request_id]

    def _send(self, worker_id: str, incarnation: str, message: Message) -> None:
        assert self._channel is not None
        try:
            self._channel.send(f"{worker_id}/{incarnation}", message)
        except PeerLost as exc:
            self._handle(WorkerLost(worker_id, incarnation, str(exc)))

    def _on_message(self, identity: str, message: Message) -> None:
        worker_id, _, incarnation = identity.rpartition("/")
        self._handle(FromWorker(worker_id, incarnation, message))

    def _on_junk(self, identity: str, error: ProtocolError) -> None:
        is_stranger = isinstance(error, StrangerRefused)
        self._own_counts[WorkerMetric.STRANGERS if is_stranger else WorkerMetric.JUNK_MESSAGES] += 1
        self._junk_log.say(str(error) if is_stranger else f"from {identity!r}: {error}")

    async def _tick(self) -> None:
        last, skipped = self.now(), False
        while True:
            await asyncio.sleep(TICK_S)
            now = self.now()
            # After a stall of this process heartbeats wait unread: look at them before the leases.
            skipped = now - last > LATE_TICK_S and not skipped
            if not skipped:
                self._handle(Tick())
            last = now

    async def _wait_until(self, what_else: str, is_done: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_done():
                    self._handled.clear()
                    await self._handled.wait()
        except TimeoutError:
            log.warning("%s after %g s; going on without", what_else, timeout_s)
