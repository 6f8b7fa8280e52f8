"""Where an operator's wishes about the pools come in, and what becomes of them outside the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

from twinpool.config import Role
from twinpool.coordinator.events import (
    Agree,
    ChangeRole,
    Decline,
    DrainWorker,
    Event,
    Reassign,
    Retire,
    SetPools,
    StartWorker,
)
from twinpool.coordinator.pool_plan import PoolChange
from twinpool.coordinator.pool_status import pool_status
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.scaler import Scaler
from twinpool.errors import PoolRefused, RequestError

Changes = tuple[PoolChange, ...]
WAIT_S = 2.0
"""How long what runs on a worker that goes may take to end, unless the operator says. With what closing and opening
links takes, capacity has moved within 5 s."""


class PoolService(Protocol):
    """What an operator may ask of a coordinator. Changes are begun when a method returns, and go on by themselves."""

    def pools(self) -> Mapping[str, Any]:
        """Every worker, as JSON values."""
        ...

    def set_pools(self, prefill: int | None, decode: int | None, wait_s: float) -> Changes:
        """Goes for so many workers of each role, 1 or more (None: as now); returns what is done for it. What runs on
        workers that go has `wait_s` to end, then it is handed on. Raises PoolRefused."""
        ...

    def drain(self, worker_id: str, wait_s: float) -> Changes:
        """That worker ends, as in `set_pools`. Raises UnknownWorker, PoolRefused."""
        ...

    def change_role(self, worker_id: str, role: Role, wait_s: float) -> Changes:
        """That worker takes another role, as in `set_pools`. Raises UnknownWorker, PoolRefused."""
        ...


class TellsStatus(Protocol):
    """Has a status that operators are shown beside the pools'."""

    def status(self) -> Mapping[str, Any]:
        """The status as JSON values."""
        ...


class PoolDesk:
    """The `PoolService` of a coordinator: `handle` feeds its core, whose answers come to `carry_out` within that call.
    `scaler` starts and ends workers; with None, `why_no_scaler` says who does. `tuner` tunes the pools, if one does."""

    def __init__(self, registry: Registry, handle: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._registry = registry
        self._handle = handle
        self._now = now
        self._numbers = count()
        self._answers: dict[str, Changes | RequestError] = {}
        self.scaler: Scaler | None = None
        self.why_no_scaler = "this server starts no workers"
        self.tuner: TellsStatus | None = None

    def pools(self) -> Mapping[str, Any]:
        """As `PoolService.pools`."""
        status = pool_status(self._registry, self.scaler, self._now())
        return status if self.tuner is None else {**status, "autotune": self.tuner.status()}

    def set_pools(self, prefill: int | None, decode: int | None, wait_s: float) -> Changes:
        """As `PoolService.set_pools`."""
        kept = {} if self.scaler is None else self.scaler.workers()
        why_no_start = self.why_no_scaler if self.scaler is None else self.scaler.why_no_start()
        return self._ask(lambda ticket: SetPools(ticket, prefill, decode, wait_s, kept, why_no_start))

    def drain(self, worker_id: str, wait_s: float) -> Changes:
        """As `PoolService.drain`."""
        return self._ask(lambda ticket: DrainWorker(ticket, worker_id, wait_s))

    def change_role(self, worker_id: str, role: Role, wait_s: float) -> Changes:
        """As `PoolService.change_role`."""
        return self._ask(lambda ticket: ChangeRole(ticket, worker_id, role, wait_s))

    def carry_out(self, command: Agree | Decline | StartWorker | Reassign | Retire) -> None:
        """Keeps the core's answer to a wish, or passes on to the scaler what it is to do."""
        match command:
            case Agree(ticket, changes):
                self._answers[ticket] = changes
            case Decline(ticket, error):
                self._answers[ticket] = error
            case StartWorker(role) if self.scaler is not None:
                self.scaler.start(role)
            case Reassign(worker_id, role) if self.scaler is not None:
                self.scaler.assign(worker_id, role)
            case Retire(worker_id, role) if self.scaler is not None:
                self.scaler.stop(worker_id, role)

    def _ask(self, wish: Callable[[str], Event]) -> Changes:
        ticket = str(next(self._numbers))
        self._handle(wish(ticket))
        answer = self._answers.pop(ticket, None)
        if answer is None:
            raise PoolRefused(
                "the server failed to change its pools, which is a bug in Twinpool; see its log"
            )
        if isinstance(answer, RequestError):
            raise answer
        return answer
