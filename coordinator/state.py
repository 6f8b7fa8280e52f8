"""The coordinator's decisions: events in, commands out, no I/O and no clock.

The life of a request in eight steps::

    1  Arrived            admission says yes (queued) or Refuse
    2  dispatch           a linked pair with room: Prefill to P and Reserve to D at once (prefilling)
    3  Granted            D's blocks, forwarded to P as PushTo
    4  first token of P   streamed at once (transferring), while P's blocks still travel
    5  HandoffReport      D owns the request (decoding), P holds nothing any more
    6  tokens of D        delivered in order of index, each once
    7  last token         the client has its answer (draining) while workers let go of what they hold
    8  all legs closed    terminal, and the timeline is kept

A colocated worker does 2 to 6 alone, and a hybrid one may (`coordinator/hybrid.py`). An attempt that is lost
(preempted, no room, transfer failed, worker gone) goes back to 2 with the tokens so far as part of the prompt. At most
`max_attempts` are started, and all requests together draw from a retry budget, those that ended for lack of room not
counted: that is no fault of the request. It is bounded all the same, by `max_tokens` while it makes progress, and
without progress by `max_wait_s` since the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinpool.config import CoordinatorConfig
from twinpool.coordinator import events
from twinpool.coordinator.accounts import Accounts
from twinpool.coordinator.admission import Admission
from twinpool.coordinator.clients import Clients
from twinpool.coordinator.custody import Custody
from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.dispatch import Dispatch
from twinpool.coordinator.ended import SETTLE_S
from twinpool.coordinator.events import Command, Event
from twinpool.coordinator.health import Health
from twinpool.coordinator.membership import Membership
from twinpool.coordinator.partings import Partings
from twinpool.coordinator.pools import Pools
from twinpool.coordinator.reports import Reports
from twinpool.coordinator.request_record import EndedRequest
from twinpool.coordinator.retries import RetryBudget
from twinpool.coordinator.routing import Router, prefix_of
from twinpool.coordinator.service import Submission
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.timeline import Timeline
from twinpool.coordinator.waiting import WaitingQueue
from twinpool.coordinator.worker import Worker
from twinpool.errors import InvariantViolation, RequestFailed
from twinpool.messages import LockstepTokens
from twinpool.request import RequestState

QUIET_HEARTBEATS = 4
"""A worker that has missed so many gets nothing new until it is heard of again."""
CHECK_S = 5.0
"""How often the books are recounted while serving: it takes a moment per request."""
AGED_SHARE = 0.5
"""A request that has waited for this part of `max_wait_s` is passed by no later one of its tenant, whatever the
priority."""


class CoordinatorCore:
    """All requests and all workers of one coordinator.

    `eos_token_ids` are the model's; `prefix_of` names the prefixes of a prompt, as `routing.prefix_chain` does by its
    tokens. `handle` returns what to do, in order; after an InvariantViolation the commands up to the fault come with
    the next call.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        eos_token_ids: tuple[int, ...],
        prefix_of: Callable[[Submission], Sequence[int]] = prefix_of,
    ) -> None:
        self._config = config
        self._commands: list[Command] = []
        self._checked_at = 0.0
        self.tally = Tally()
        self.accounts = Accounts()
        self.retries = RetryBudget(config.retry_budget)
        self.queue = WaitingQueue(aged_s=config.max_wait_s * AGED_SHARE)
        self.membership = Membership(
            config,
            self.tally,
            self._commands.append,
            self._lose,
            lambda *names: self._router.succeeded(*names),
        )
        self.registry = self.membership.registry
        self._custody = Custody(
            config, self.queue, self.registry, self.retries, self.tally, self._commands.append
        )
        self._admission = Admission(config, self.registry, self.queue, self.accounts, self._custody.stays)
        self._router = Router(
            self.registry,
            self._admission.prefill,
            self._custody.answers,
            QUIET_HEARTBEATS * config.heartbeat_s,
        )
        self._partings = Partings(self._custody, self._router, self.membership.remove)
        self.pools = Pools(config, self.registry, self._lose, self._partings.hand_on, self._commands.append)
        self._health = Health(self.registry, config.stall_s)
        self._reports = Reports(
            self._custody,
            Delivery(self._custody, self.tally, self._commands.append),
            self.membership,
            self._health,
            self._admission.prefill,
            self.tally,
            self._commands.append,
        )
        self._clients = Clients(
            config,
            self._custody,
            self.queue,
            self._admission,
            self.accounts,
            self._router,
            self.retries,
            self.tally,
            self._commands.append,
            prefix_of,
        )
        self._dispatch = Dispatch(
            config,
            eos_token_ids,
            self.queue,
            self.registry,
            self._router,
            self._custody,
            self._admission,
            self._health,
            self.tally,
            self._clients.no_worker,
        )

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event at `now` (seconds on the coordinator clock, never falling).

        Raises:
            InvariantViolation: a bug, with the story of the request.
        """
        try:
            self._take(event, now)
            self.pools.advance(now)
            self._dispatch.advance(now)
        except InvariantViolation as exc:
            self._custody.give_up(exc.request_id, now)
            raise
        self._admission.pace.observe(now, is_waiting=len(self.queue) > 0)
        commands = self._commands[:]
        self._commands.clear()
        return commands

    def count_steps(
        self, worker_id: str, incarnation: str, message: LockstepTokens, times: Sequence[float]
    ) -> list[tuple[float, list[Command]]]:
        """What `handle` does with a message of a worker in lockstep at each of `times`, but nobody is sent on: where
        nobody has become able to take a request, that would change nothing. Returns the times at which there is
        something to do, and what."""
        if (worker := self.registry.live(worker_id, incarnation)) is None:
            return []
        if not (message.tokens or message.left) and self._reports.count_steps(worker, times):
            return []
        found = []
        for at in times:
            self._reports.take_step(worker, message, at)
            found.append((at, self._commands[:]))
            self._commands.clear()
        return found

    def hold(self, worker_id: str, num_tokens: int) -> None:
        """The streams of a worker in lockstep have filled so many slots more than it has told, or (below 0) what was
        said here is taken back: right before the worker tells of it, and nobody looks in between."""
        if (worker := self.registry.get(worker_id)) is not None:
            worker.hold(num_tokens)

    def _take(self, event: Event, now: float) -> None:
        match event:
            case events.FromWorker(worker_id, incarnation, message):
                if (worker := self.registry.live(worker_id, incarnation)) is not None:
                    self._reports.take(worker, message, now)
                else:
                    self.membership.from_stranger(worker_id, incarnation, message, now)
            case events.Arrived(submission):
                self._clients.arrived(submission, now)
            case events.Knocked(request_id, tenant, priority):
                self._clients.knocked(request_id, tenant, priority, now)
            case events.Tick():
                self._tick(now)
            case events.Completed(request_id, num_output_tokens):
                self._clients.completed(request_id, num_output_tokens, now)
            case events.Abandoned(request_id):
                self._clients.abandoned(request_id, now)
            case events.Cancelled(request_id, tenant):
                self._clients.cancelled(request_id, tenant, now)
            case events.Cut(request_id, error):
                self._clients.cut(request_id, error, now)
            case events.Delivered(request_id):
                self._clients.delivered(request_id, now)
            case events.WorkerLost(worker_id, incarnation, reason):
                if (worker := self.registry.live(worker_id, incarnation)) is not None:
                    # One that was told to take another role holds nothing, and has gone to do so or is dead: either
                    # way its process is not to be ended.
                    worker.has_left |= worker.keeps_cache
                    self._lose(worker, reason, now)
            case events.PoolGivenUp(role, reason):
                self._dispatch.give_up(role, reason)
            case events.ChangeRole() | events.DrainWorker() | events.SetPools():
                self.pools.take(event, now)
                self._dispatch.hope()  # whoever starts workers may start some
            case events.Drain():
                self._clients.is_draining = self.pools.is_closed = True
            case events.Shutdown():
                self._shut_down(now)

    def is_live(self, request_id: str) -> bool:
        """Whether a request with this id has not reached a terminal state, or is still known to a worker."""
        return request_id in self._custody.requests

    @property
    def num_live(self) -> int:
        """Requests that have not reached a terminal state."""
        return len(self._custody.requests)

    def live_by_state(self) -> dict[RequestState, int]:
        """How many live requests are in which state."""
        counts: dict[RequestState, int] = {}
        for request in self._custody.requests.values():
            counts[request.state] = counts.get(request.state, 0) + 1
        return counts

    def health(self, now: float) -> tuple[bool, str]:
        """Whether work that waits makes progress, and a sentence: what stands still."""
        return self._health.verdict(self.num_live, len(self.queue), now)

    def timeline(self, request_id: str) -> Timeline | None:
        """The timeline of a live or recent request."""
        return self._clients.timeline(request_id)

    def prefix(self, request_id: str) -> Sequence[int]:
        """The names of a live request's prefixes; none of another."""
        request = self._custody.requests.get(request_id)
        return () if request is None else request.prefix

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; 1 while no worker has joined."""
        return 1 if (terms := self.registry.terms) is None else terms.layout.block_size

    def ended(self, now: float, settle_s: float) -> list[EndedRequest]:
        """What is to be recorded of requests that ended `settle_s` ago or earlier, each once."""
        return self._custody.ended.due(now, self.block_size, settle_s)

    # ── losses and ends ─────────────────────────────────────────────────────────────────────────────────────

    def _lose(self, worker: Worker, reason: str, now: float) -> None:
        self._reports.lost(worker)
        self._partings.lose(worker, reason, now)
        self.pools.gone(worker)

    # ── time and shutdown ───────────────────────────────────────────────────────────────────────────────────

    def _tick(self, now: float) -> None:
        self.membership.tick(now)
        self._clients.tick(now)
        self._commands += map(events.Record, self.ended(now, SETTLE_S))
        if not self.num_live:
            self._health.moved(now)
        if self.is_check_due(now):
            self._checked_at = now
            self.check()

    def _shut_down(self, now: float) -> None:
        self._clients.is_draining = self.pools.is_closed = True
        error = RequestFailed("the server stopped before the answer was complete")
        self._clients.time_out_all(error, now)
        self.membership.stop_all()

    def is_check_due(self, now: float) -> bool:
        """Whether a Tick will recount who holds what."""
        return now - self._checked_at >= CHECK_S

    def check(self) -> None:
        """Recounts who holds what. Raises InvariantViolation."""
        self._reports.catch_up()
        self._custody.check()
