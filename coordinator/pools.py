"""What an operator wants of the pools: one worker drained, another role for one, so many of each.

A worker on its way out gets nothing new. What runs there may end for a while; what is left then goes on elsewhere with
the tokens that it has, which is charged to nobody. A worker that holds nothing any more is told to go: with Stop, or
with TakeRole, after which the same process registers again with its model and its prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinpool.config import MOST_WORKERS, CoordinatorConfig, Role
from twinpool.coordinator.events import (
    Agree,
    ChangeRole,
    Command,
    Decline,
    DrainWorker,
    Note,
    Reassign,
    Retire,
    Send,
    SetPools,
    StartWorker,
)
from twinpool.coordinator.pool_plan import ChangeKind, PoolChange, Seat, changes_to
from twinpool.coordinator.registry import OTHER_ROLE, Registry
from twinpool.coordinator.worker import Departure, Worker
from twinpool.errors import PoolRefused, RequestError, UnknownWorker
from twinpool.messages import Stop, TakeRole

OBEYS_WITHIN_LEASES = 4
"""A worker that was told to go, and is still there after so many leases, counts as lost."""

Wish = ChangeRole | DrainWorker | SetPools


class Pools:
    """Carries out wishes. `emit` takes commands in order; `lose` a worker that counts as lost, why, and `now`: it calls
    `gone`; `hand_on` one whose requests are to go on elsewhere, the KV slots that the largest pool there has, why, and
    `now`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        lose: Callable[[Worker, str, float], None],
        hand_on: Callable[[Worker, int, str, float], None],
        emit: Callable[[Command], None],
    ) -> None:
        self._patience_s = OBEYS_WITHIN_LEASES * config.lease_s
        self._start_s = config.start_timeout_s
        self._registry = registry
        self._lose = lose
        self._hand_on = hand_on
        self._emit = emit
        self._departing: list[Worker] = []
        self.is_closed = False
        """The server is stopping: nothing is changed any more."""

    def take(self, wish: Wish, now: float) -> None:
        """Does what is wanted, or none of it, and emits Agree or Decline."""
        try:
            if self.is_closed:
                raise PoolRefused("the server is stopping; its pools stay as they are")
            match wish:
                case ChangeRole(worker_id=worker_id, role=role, wait_s=wait_s):
                    changes = self._change_role(self._worker(worker_id), role, wait_s, now)
                case DrainWorker(worker_id=worker_id, wait_s=wait_s):
                    changes = self._drain(self._worker(worker_id), wait_s, now)
                case SetPools():
                    changes = self._set(wish, now)
        except RequestError as error:
            self._emit(Decline(wish.ticket, error))
        else:
            self._emit(Agree(wish.ticket, tuple(changes)))

    def advance(self, now: float) -> None:
        """Moves on what is under way. Costs nothing while nothing is."""
        if self.is_closed:
            return
        self._forget_who_does_not_come(now)
        for worker in self._departing[:]:
            departure = worker.departure
            if departure is None:
                continue
            if departure.told_at is not None:
                if now - departure.told_at > self._patience_s:
                    self._lose(worker, f"was told to go and has not for {self._patience_s:g} s", now)
            elif not (others := self._others(worker)):
                self._call_off(worker, departure)
            elif not worker.legs:
                self._tell(worker, departure, now)
            elif now >= departure.hand_on_at and (takers := self._linked(others)):
                self._hand_on(worker, max(taker.num_slots for taker in takers), departure.purpose, now)

    def gone(self, worker: Worker) -> None:
        """The worker has gone, as it was told or otherwise. One that was to end does so, unless all are to."""
        if worker.departure is None:
            return
        self._departing.remove(worker)
        if worker.departure.role is None and worker.departure.told_at is None and not self.is_closed:
            self._emit(Retire(worker.worker_id, worker.role))

    # ── wishes ──────────────────────────────────────────────────────────────────────────────────────────────

    def _worker(self, worker_id: str) -> Worker:
        worker = self._registry.get(worker_id) or self._registry.changing.get(worker_id)
        if worker is None:
            known = ", ".join(sorted(worker.worker_id for worker in self._registry)) or "none"
            raise UnknownWorker(f"no worker {worker_id!r} has joined; those that have: {known}")
        return worker

    def _change_role(self, worker: Worker, role: Role, wait_s: float, now: float) -> list[PoolChange]:
        name = worker.worker_id
        if worker.info.fixed_role:
            raise PoolRefused(f"{name} stays a {worker.role} worker: {worker.info.fixed_role}")
        if role is Role.COLOCATED:
            raise PoolRefused(f"{name} cannot become colocated; allowed: {Role.PREFILL}, {Role.DECODE}")
        if worker.departure is not None and worker.departure.role is not role:
            raise PoolRefused(f"{name} {worker.departure.purpose} already; wait until it has gone")
        if worker.departure is not None or worker.role is role:
            return []
        self._require_others(worker)
        self._begin(worker, role, wait_s, now)
        return [PoolChange(ChangeKind.ROLE, role, name)]

    def _drain(self, worker: Worker, wait_s: float, now: float) -> list[PoolChange]:
        if worker.departure is not None:
            if worker.departure.role is not None:
                raise PoolRefused(
                    f"{worker.worker_id} {worker.departure.purpose} already; wait until it has gone"
                )
            return []
        self._require_others(worker)
        self._begin(worker, None, wait_s, now)
        return [PoolChange(ChangeKind.DRAIN, worker.role, worker.worker_id)]

    def _set(self, wish: SetPools, now: float) -> list[PoolChange]:
        if colocated := self._registry.of_role(Role.COLOCATED):
            raise PoolRefused(
                f"{colocated[0].worker_id} is colocated: this server has one pool; serve with --prefill and --decode "
                "to have two"
            )
        seats, wanted = self._seats(wish), {Role.PREFILL: wish.prefill, Role.DECODE: wish.decode}
        changes = changes_to(
            {
                role: sum(seat.role is role for seat in seats) if n is None else n
                for role, n in wanted.items()
            },
            seats,
        )
        num_starts = sum(change.kind is ChangeKind.START for change in changes)
        if num_starts and wish.why_no_start:
            raise PoolRefused(wish.why_no_start)
        if num_starts and (total := sum(seat.role in wanted for seat in seats) + num_starts) > MOST_WORKERS:
            raise PoolRefused(f"that would be {total} workers; a server has {MOST_WORKERS} at most")
        for change in changes:
            worker = self._registry.get(change.worker_id)
            match change.kind:
                case ChangeKind.START:
                    self._emit(StartWorker(change.role))
                case _ if worker is None:
                    self._emit(Retire(change.worker_id, change.role))
                case ChangeKind.ROLE:
                    self._begin(worker, change.role, wish.wait_s, now)
                case ChangeKind.DRAIN:
                    self._begin(worker, None, wish.wait_s, now)
        return changes

    def _seats(self, wish: SetPools) -> list[Seat]:
        """Everybody who is in a pool, or will be."""
        seats = []
        here = {worker.worker_id: worker for worker in self._registry} | self._registry.changing
        for worker in here.values():
            role = worker.role if worker.departure is None else worker.departure.role
            if role is not None:
                load = (len(worker.legs), worker.held_tokens)
                seats.append(
                    Seat(
                        worker.worker_id,
                        role,
                        load,
                        is_settled=worker.stays,
                        is_changing=not worker.stays,
                        is_linked=self._registry.is_linked(worker),
                        may_change=not worker.info.fixed_role,
                    )
                )
        coming = [(worker_id, role) for worker_id, role in wish.kept.items() if worker_id not in here]
        return seats + [Seat(worker_id, role, is_settled=False) for worker_id, role in coming]

    def _require_others(self, worker: Worker) -> None:
        if self._others(worker):
            return
        name, role = worker.worker_id, worker.role
        if unlinked := ", ".join(sorted(other.worker_id for other in self._staying_beside(worker))):
            raise PoolRefused(
                f"{name} is the last {role} worker that is linked: without it no request could run; wait until "
                f"{unlinked} is linked, or see in the server's log why that failed"
            )
        like = (
            f"`twinpool pools set --{role} 2`" if role in OTHER_ROLE else f"`twinpool worker --role {role}`"
        )
        raise PoolRefused(
            f"{name} is the last {role} worker that stays: without it no request could run; have another first, like "
            f"with {like}"
        )

    def _others(self, worker: Worker) -> list[Worker]:
        """Those of its pool that requests can go to without it: if it is linked, others that are."""
        others = self._staying_beside(worker)
        return self._linked(others) if self._registry.is_linked(worker) else others

    def _linked(self, workers: Sequence[Worker]) -> list[Worker]:
        return [worker for worker in workers if self._registry.is_linked(worker)]

    def _staying_beside(self, worker: Worker) -> list[Worker]:
        return [other for other in self._registry.of_role(worker.role) if other is not worker and other.stays]

    # ── on the way ──────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, worker: Worker, role: Role | None, wait_s: float, now: float) -> None:
        departure = Departure(role, hand_on_at=now + wait_s)
        worker.depart(departure)
        self._departing.append(worker)
        if role is not None:
            self._emit(Reassign(worker.worker_id, role))
        num_held = len(worker.legs)
        self._emit(
            Note(
                f"{worker.worker_id} {departure.purpose}; it holds {num_held} attempt(s), {wait_s:g} s to end"
            )
        )

    def _call_off(self, worker: Worker, departure: Departure) -> None:
        """It has become the last of its pool, for the others, or their links, were lost."""
        worker.depart(None)
        self._departing.remove(worker)
        if departure.role is not None:
            self._emit(Reassign(worker.worker_id, worker.role))
        self._emit(
            Note(
                f"{worker.worker_id} stays: it was on its way ({departure.purpose}), and no other {worker.role} worker "
                "is left for requests to go to"
            )
        )

    def _forget_who_does_not_come(self, now: float) -> None:
        changing = self._registry.changing
        for worker in list(changing.values()):
            departure = worker.departure
            if departure is None or departure.told_at is None or now - departure.told_at > self._start_s:
                del changing[worker.worker_id]

    def _tell(self, worker: Worker, departure: Departure, now: float) -> None:
        departure.told_at = now
        if departure.role is None:
            self._emit(Retire(worker.worker_id, worker.role))
            self._emit(Send(worker.worker_id, worker.incarnation, Stop()))
        else:
            self._emit(Send(worker.worker_id, worker.incarnation, TakeRole(departure.role)))
