"""Joining, staying and leaving: what the core does about workers themselves, apart from their requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import Command, EndProcess, Note, Send
from twinpool.coordinator.registry import OTHER_ROLE, Registry
from twinpool.coordinator.tally import Tally
from twinpool.coordinator.worker import Worker
from twinpool.messages import (
    Denied,
    Heartbeat,
    Left,
    LinkFailed,
    LinkReady,
    Message,
    Register,
    StartAnew,
    Stop,
    Welcome,
)
from twinpool.metrics import CoordinatorMetric

CANCEL_PATIENCE_LEASES = 4
"""A worker that does not answer a Cancel for so many leases counts as lost: it holds blocks nobody can use."""
MAX_REMEMBERED_LOST = 1024


class Membership:
    """Keeps the registry true.

    `emit` takes commands in order; `lose` takes a worker that is gone, why, and `now`: it settles the
    worker's requests and calls `remove`. `succeeded` takes the incarnation of a process before it took another role,
    and the one that it has now. A process that counted as lost once never joins again: what it holds
    is nobody's, so it is told to start anew, or to stop if its place is taken.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        tally: Tally,
        emit: Callable[[Command], None],
        lose: Callable[[Worker, str, float], None],
        succeeded: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._tally = tally
        self._emit = emit
        self._lose = lose
        self._succeeded = succeeded
        self._lost: deque[str] = deque(maxlen=MAX_REMEMBERED_LOST)
        self._is_stopping = False
        self.registry = Registry()

    def from_stranger(self, worker_id: str, incarnation: str, message: Message, now: float) -> None:
        """A message of a process that is no member: it may want to be, or does not know that it counts as lost or
        that this coordinator is not the one that it joined.
        """
        if isinstance(message, Register):
            self._register(worker_id, incarnation, message, now)
            return
        self._tally.add(CoordinatorMetric.STALE_MESSAGES)
        if isinstance(message, Heartbeat):
            self._turn_away(worker_id, incarnation)

    def from_member(self, worker: Worker, message: Message, now: float) -> None:
        """Takes what a worker that has joined says about its links, or that it leaves."""
        match message:
            case LinkReady() | LinkFailed():
                self._link(worker, message)
            case Left(reason=reason):
                worker.has_left = True
                self._lose(worker, f"left: {reason}", now)
            case Register():
                self._welcome(worker)
            case _:
                self._tally.add(CoordinatorMetric.PROTOCOL_FAULTS)
                what = type(message).__name__
                self._emit(Note(f"{worker.worker_id} sent {what}, which no worker may", is_fault=True))

    def tick(self, now: float) -> None:
        """Gives up workers that are silent, or that sit on what they were told to release."""
        lease_s = self._config.lease_s
        patience_s = CANCEL_PATIENCE_LEASES * lease_s
        for worker in self.registry.expired(now, lease_s):
            self._lose(worker, f"no sign of life for {lease_s:g} s", now)
        for worker in list(self.registry):
            since = worker.cancelled_since
            if since is not None and now - since > patience_s:
                self._lose(worker, f"no answer to a Cancel for {patience_s:g} s", now)

    def remove(self, worker: Worker, reason: str) -> None:
        """The worker is gone: nobody is sent to it any more, and its counters are kept."""
        self.registry.remove(worker)
        self._lost.append(worker.incarnation)
        if not worker.has_left:
            self._emit(EndProcess(worker.worker_id, worker.info.pid))
        if (departure := worker.departure) is None or departure.told_at is None:
            self._tally.add(CoordinatorMetric.WORKERS_LOST, worker.role)
        elif departure.role is None:
            self._tally.add(CoordinatorMetric.WORKERS_DRAINED, worker.role)
        elif not worker.has_left:
            self._tally.add(CoordinatorMetric.WORKERS_LOST, worker.role)
        if worker.stats is not None:
            self._tally.retire_worker(worker.worker_id, worker.role, worker.stats.counters)
        self._emit(Note(f"worker {worker.worker_id} is gone: {reason}"))
        self._tell_peers_of(worker.role)

    def stop_all(self) -> None:
        """Tells every worker to stop, and those that come later too."""
        self._is_stopping = True
        for worker in self.registry:
            self._emit(Send(worker.worker_id, worker.incarnation, Stop()))

    def _turn_away(self, worker_id: str, incarnation: str) -> None:
        # Not while another process has its name: the two would take turns in driving each other out.
        may_return = not self._is_stopping and self.registry.get(worker_id) is None
        self._emit(Send(worker_id, incarnation, StartAnew() if may_return else Stop()))

    def _register(self, worker_id: str, incarnation: str, offer: Register, now: float) -> None:
        if self._is_stopping or incarnation in self._lost:
            self._turn_away(worker_id, incarnation)
            return
        reason = self.registry.refusal(offer)
        if self._config.strict and offer.itl_budget_s is not None:
            reason = reason or (
                f"worker {worker_id} is a hybrid (--hybrid, --itl-budget {offer.itl_budget_s * 1e3:g}), this server is "
                "--strict; start the worker without --hybrid, or the server without --strict"
            )
        if (offer.worker_id, offer.incarnation) != (worker_id, incarnation):
            reason = (
                f"worker {offer.worker_id}/{offer.incarnation} registers over the connection of "
                f"{worker_id}/{incarnation}; use one identity for both"
            )
        if reason is not None:
            self._tally.add(CoordinatorMetric.WORKERS_DENIED)
            self._emit(Send(worker_id, incarnation, Denied(reason)))
            self._emit(Note(f"denied: {reason}"))
            return
        if (predecessor := self.registry.get(worker_id)) is not None:
            if predecessor.incarnation == offer.succeeds:  # this has overtaken its Left
                predecessor.has_left = True
                self._lose(predecessor, "left for another role", now)
            else:
                self._lose(predecessor, "replaced by a new process of the same name", now)
        worker = self.registry.join(offer, now)
        if offer.succeeds:
            self._tally.add(CoordinatorMetric.ROLE_CHANGES, offer.role)
            self._succeeded(offer.succeeds, offer.incarnation)
        self._welcome(worker)
        self._emit(
            Note(f"worker {worker_id} joined as {worker.role}, pid {offer.pid}, {offer.num_blocks} blocks")
        )
        self._tell_peers_of(worker.role)

    def _welcome(self, worker: Worker) -> None:
        welcome = Welcome(self._config.heartbeat_s)
        self._emit(Send(worker.worker_id, worker.incarnation, welcome))
        if worker.role in OTHER_ROLE:
            self._emit(Send(worker.worker_id, worker.incarnation, self.registry.peers_of(worker)))

    def _tell_peers_of(self, role: Role) -> None:
        """Membership of `role` has changed: its counterparts get the new list."""
        if role in OTHER_ROLE and not self._is_stopping:
            for peer in self.registry.of_role(OTHER_ROLE[role]):
                self._emit(Send(peer.worker_id, peer.incarnation, self.registry.peers_of(peer)))

    def _link(self, worker: Worker, report: LinkReady | LinkFailed) -> None:
        if not self.registry.record_link(worker, report):
            self._tally.add(CoordinatorMetric.STALE_MESSAGES)
        elif isinstance(report, LinkReady):
            self._emit(
                Note(
                    f"link {worker.worker_id} → {report.decode_worker}: {report.transport}, "
                    f"{report.gb_per_s:.2f} GB/s measured over {report.probe_bytes} bytes"
                )
            )
            if report.gb_per_s < (wanted := self._config.min_link_gb_per_s):
                self._tally.add(CoordinatorMetric.SLOW_LINKS)
                slow = f"slow link {worker.worker_id} → {report.decode_worker}: {report.transport} with"
                what_to_do = "see `twinpool doctor`, --transport and --kv-host, or lower --min-link"
                self._emit(
                    Note(f"{slow} {report.gb_per_s:.3f} GB/s, wanted {wanted:g}; {what_to_do}", is_fault=True)
                )
        else:
            self._emit(Note(f"no link {worker.worker_id} → {report.decode_worker}: {report.reason}"))
