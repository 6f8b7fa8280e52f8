"""One coordinator: what the gateway asks of it, its start and its end, and the timer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from twinpool.clock import Clock, MonotonicClock
from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import (
    Abandoned,
    Cancelled,
    Cut,
    Delivered,
    Drain,
    Knocked,
    PoolGivenUp,
    Shutdown,
    Tick,
    WorkerLost,
)
from twinpool.coordinator.exposition import Exposition
from twinpool.coordinator.pool_desk import PoolDesk
from twinpool.coordinator.scaler import Member
from twinpool.coordinator.service import Output, RequestFacts, Submission, Take
from twinpool.coordinator.shell import CoordinatorShell
from twinpool.coordinator.state import CoordinatorCore
from twinpool.coordinator.tenants import Allowances, Tenant
from twinpool.coordinator.timeline import Timeline
from twinpool.coordinator.tuning import Tuner, WorkerTerms, worker_terms
from twinpool.coordinator.vital import OnFailure, start_vital
from twinpool.errors import NoWorker, RequestError, UnknownRequest

TICK_S = 0.1
LATE_TICK_S = 0.5
LEAVE_GRACE_S = 3.0

log = logging.getLogger(__name__)


class Coordinator:
    """The `Service` behind the gateway, and what whoever starts workers and tunes the pools asks of it.

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
        self._on_failure = on_failure
        self._core = CoordinatorCore(config, eos_token_ids)
        self._shell = CoordinatorShell(self._core, self.now, end_process, tuner)
        self._exposition = Exposition(self._core, self._shell.counts, self.now)
        self._exposition.tuner = self.pool_desk.tuner = tuner
        self._is_stopping = False
        self._ticker: asyncio.Task[None] | None = None

    # ── life of the server ──────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Opens the control endpoint and starts the timer.

        Raises:
            ConfigError: the control address cannot be bound, or the record cannot be written.
        """
        self._shell.open(self._config)
        self._exposition.recorder = self._shell.recorder
        self._ticker = start_vital(self._tick(), "no lease or deadline would end any more", self._on_failure)

    @property
    def endpoint(self) -> str:
        """Where workers connect. Raises TwinpoolError before `start`."""
        return self._shell.endpoint

    async def drain_and_stop(self) -> None:
        """Admits nothing more, lets running requests end for at most `drain_s`, then stops the workers and itself.

        What is not complete by then ends with a timeout in its stream. Cancelling this skips the waits,
        nothing else. Calling it twice is fine, and before `start` it does nothing.
        """
        if self._is_stopping or self._ticker is None:
            return
        self._is_stopping = True
        try:
            self._shell.handle(Drain())
            await self._wait_until(
                "requests still run", lambda: self._core.num_live == 0, self._config.drain_s
            )
        finally:
            self._shell.handle(Shutdown())
            try:
                await self._wait_until(
                    "workers have not said goodbye", lambda: len(self._core.registry) == 0, LEAVE_GRACE_S
                )
            finally:
                self._ticker.cancel()
                self._shell.close()

    async def _tick(self) -> None:
        last, skipped = self.now(), False
        while True:
            await asyncio.sleep(TICK_S)
            now = self.now()
            # After a stall of this process heartbeats wait unread: look at them before the leases.
            skipped = now - last > LATE_TICK_S and not skipped
            if not skipped:
                self._shell.handle(Tick())
            last = now

    async def _wait_until(self, what_else: str, is_done: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._shell.until(is_done)
        except TimeoutError:
            log.warning("%s after %g s; going on without", what_else, timeout_s)

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pool_desk(self) -> PoolDesk:
        """Where operators, and a tuner, change the pools."""
        return self._shell.pool_desk

    def members(self) -> Mapping[str, Member]:
        """The workers that have joined, by id, also while they change their role."""
        return {
            worker.worker_id: Member(
                worker.role, worker.departure is not None and worker.departure.role is None
            )
            for worker in (*self._core.registry.changing.values(), *self._core.registry)
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
            self._shell.handle(WorkerLost(worker_id, worker.incarnation, reason))

    def pool_given_up(self, role: Role, reason: str) -> None:
        """Nobody starts workers of this role any more: what waits for them ends at once, unless others have joined."""
        self._shell.handle(PoolGivenUp(role, reason))

    # ── Service ─────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        """The coordinator clock, in seconds."""
        return self._clock.now()

    def submit(self, submission: Submission, take: Take | None = None) -> AsyncIterator[Output]:
        """Admits the request; see `Service.submit`."""
        return self._shell.submit(submission, take)

    def knock(self, request_id: str, tenant: Tenant, priority: int) -> None:
        """Raises if the request would be refused whatever its prompt; see `Service.knock`."""
        self._shell.ask(request_id, Knocked(request_id, tenant, priority))

    def complete(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string ended the answer; see `Service.complete`."""
        self._shell.complete(request_id, num_output_tokens)

    def abandon(self, request_id: str) -> None:
        """The client has left; see `Service.abandon`."""
        self._shell.handle(Abandoned(request_id))

    def cancel(self, request_id: str, tenant: Tenant) -> None:
        """Its client wants it to end; see `Service.cancel`."""
        self._shell.ask(request_id, Cancelled(request_id, tenant.name))

    def cut(self, request_id: str, error: RequestError) -> None:
        """The gateway gives it up; see `Service.cut`."""
        self._shell.handle(Cut(request_id, error))

    def delivered(self, request_id: str) -> None:
        """The first output was handed to the connection."""
        self._shell.handle(Delivered(request_id))

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
