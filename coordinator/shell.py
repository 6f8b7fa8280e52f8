"""Feeds the coordinator's core and carries out what it says: to workers, to who reads answers, to the record."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable

from twinpool.channel import RouterChannel
from twinpool.config import CoordinatorConfig
from twinpool.coordinator.events import (
    Agree,
    Arrived,
    Command,
    Completed,
    Cut,
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
    WorkerLost,
)
from twinpool.coordinator.pool_desk import PoolDesk
from twinpool.coordinator.record_file import RequestRecorder, start_recorder
from twinpool.coordinator.service import Output, Submission, Take
from twinpool.coordinator.state import CoordinatorCore
from twinpool.coordinator.streams import OutputStream
from twinpool.coordinator.tuning import Tuner
from twinpool.errors import (
    InvariantViolation,
    PeerLost,
    ProtocolError,
    RequestError,
    RequestFailed,
    StrangerRefused,
    TwinpoolError,
)
from twinpool.junk_log import JunkLog
from twinpool.messages import Message
from twinpool.metrics import WorkerMetric

BUGS = (InvariantViolation, AttributeError, LookupError, TypeError, ValueError)
"""What a bug of ours raises. It is counted and logged; timers, leases and all other requests go on."""

log = logging.getLogger(__name__)


class CoordinatorShell:
    """The shell around `core`: the workers' control endpoint, a stream per request, the record.

    `now` is the coordinator clock, in seconds. `end_process(worker_id, pid)` kills that process if it is one that this
    server started; it does not wait. `tuner` hears of requests. All methods are called on the event loop that ran
    `open`.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        now: Callable[[], float],
        end_process: Callable[[str, int], None] | None,
        tuner: Tuner | None,
    ) -> None:
        self._core = core
        self._now = now
        self._end_process = end_process
        self._tuner = tuner
        self.pool_desk = PoolDesk(core.registry, self.handle, now)
        self.counts: Counter[WorkerMetric] = Counter()
        self.recorder: RequestRecorder | None = None
        self._channel: RouterChannel | None = None
        self._junk_log = JunkLog(log)
        self._streams: dict[str, OutputStream] = {}
        self._refusals: dict[str, RequestError] = {}
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._handled = asyncio.Event()

    def open(self, config: CoordinatorConfig) -> None:
        """Opens the record, if there is to be one, and the control endpoint.

        Raises:
            ConfigError: the control address cannot be bound, or the record cannot be written.
        """
        if config.record is not None:
            self.recorder = start_recorder(config.record, self._now())
        self._channel = RouterChannel(config.control, config.join_token, self._on_message, self._on_junk)

    @property
    def endpoint(self) -> str:
        """Where workers connect. Raises TwinpoolError before `open`."""
        if self._channel is None:
            raise TwinpoolError("the coordinator has no endpoint before start()")
        return self._channel.endpoint

    def close(self) -> None:
        """Closes the endpoint, and the record with the requests that have ended. Nothing is handled after this."""
        if self._channel is not None:
            self._channel.close()
        if self.recorder is not None:
            for ended in self._core.ended(self._now(), settle_s=0.0):
                self.recorder.put(ended)
            self.recorder.close()

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, submission: Submission, take: Take | None) -> OutputStream:
        """Feeds the core a request; its outputs come through what is returned. See `Service.submit`.

        Raises:
            RequestError: the core refuses it, or failed to take it on.
            InvariantViolation: a live request has its id.
        """
        request_id = submission.request_id
        if self._core.is_live(request_id):
            raise InvariantViolation(f"two requests at once have the id {request_id!r}")
        stream = self._streams[request_id] = OutputStream(take)
        self.handle(Arrived(submission))
        if self._tuner is not None:
            self._tuner.arrived(submission, self._core.prefix(request_id), self._now())
        error = self._refusals.pop(request_id, None)
        if error is None and self._core.timeline(request_id) is not None:
            return stream
        del self._streams[request_id]
        raise error or RequestFailed("the server failed to take the request on, which is a bug in Twinpool")

    def ask(self, request_id: str, event: Event) -> None:
        """Feeds the core an event of that request. Raises the RequestError with which the core refuses it."""
        self.handle(event)
        if (error := self._refusals.pop(request_id, None)) is not None:
            raise error

    def complete(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string ended the answer; see `Service.complete`."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.close()
        self.handle(Completed(request_id, num_output_tokens))

    # ── events and commands ─────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event) -> None:
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

    async def until(self, is_done: Callable[[], bool]) -> None:
        """Returns when `is_done()`, which is asked after every event."""
        while not is_done():
            self._handled.clear()
            await self._handled.wait()

    def _handle_one(self, event: Event) -> None:
        if isinstance(event, Completed):
            # Not before its turn: outputs that are on their way may have ended the answer.
            self._streams.pop(event.request_id, None)
        try:
            commands = self._core.handle(event, self._now())
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
        self.counts[WorkerMetric.INVARIANT_VIOLATIONS] += 1
        log.exception("a bug in Twinpool, at %s", type(event).__name__)

    def _break_off(self, emit: Emit) -> None:
        """The outputs of that request do not add up, a bug of ours: reader and workers are told that it ends."""
        error = RequestFailed("the server lost track of the answer, which is a bug in Twinpool; try again")
        if (stream := self._streams.get(emit.request_id)) is None:
            return
        stream.break_off(error)
        if emit.output.finish is None:
            self.handle(Cut(emit.request_id, error))
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
                if self.recorder is not None:
                    self.recorder.put(ended)
                if self._tuner is not None:
                    self._tuner.ended(ended, self._now())
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
            self._tuner.emitted(request_id, len(output.token_ids), self._now())
        if output.finish is not None:
            del self._streams[request_id]

    def _send(self, worker_id: str, incarnation: str, message: Message) -> None:
        assert self._channel is not None, "no worker joins before there is an endpoint"
        try:
            self._channel.send(f"{worker_id}/{incarnation}", message)
        except PeerLost as exc:
            self.handle(WorkerLost(worker_id, incarnation, str(exc)))

    def _on_message(self, identity: str, message: Message) -> None:
        worker_id, _, incarnation = identity.rpartition("/")
        self.handle(FromWorker(worker_id, incarnation, message))

    def _on_junk(self, identity: str, error: ProtocolError) -> None:
        is_stranger = isinstance(error, StrangerRefused)
        self.counts[WorkerMetric.STRANGERS if is_stranger else WorkerMetric.JUNK_MESSAGES] += 1
        self._junk_log.say(str(error) if is_stranger else f"from {identity!r}: {error}")
