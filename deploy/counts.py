"""How many workers of each role a cluster's tool is to run, and what it is told of that. Pure.

Such a tool knows numbers, not names, and nothing of roles that change: a worker counts for the role that it was started
as, whatever it has become.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from twinpool.config import Role
from twinpool.coordinator.registry import OTHER_ROLE
from twinpool.coordinator.scaler import Member
from twinpool.errors import InvariantViolation

_AWAITED = "-awaited-"
"""In the name of a worker that has not joined, between its role and a number."""


@dataclass(frozen=True, slots=True)
class Order:
    """There are to be `count` workers started as `role`. Those of `gone` have been told to end, which makes them fewer:
    they hold nothing any more."""

    role: Role
    count: int
    gone: tuple[str, ...] = ()


class Counts:
    """What is wanted of the tool, and what it was told. `members` are the workers that have joined; all count as the
    tool's, which would end some that serve if it were told of fewer than there are."""

    def __init__(self) -> None:
        self._wanted: dict[Role, int] = {}
        self._told: dict[Role, int] = {}
        self._gone: dict[str, Role] = {}
        """Workers that were told to end, of which the tool knows nothing yet, by the role that they were started as."""
        self._started_as: dict[str, Role] = {}
        """Of workers that have changed."""
        self.order: Order | None = None
        """What the tool is being told."""

    def begin(self, roles: Iterable[Role]) -> None:
        """A worker is wanted for each of `roles`."""
        for role in roles:
            self.start(role, {})

    def start(self, role: Role, members: Mapping[str, Member]) -> None:
        """One more."""
        self._wanted[role] = max(self._wanted.get(role, 0), self._joined(members)[role]) + 1

    def stop(self, worker_id: str, role: Role, members: Mapping[str, Member]) -> None:
        """One less: this one, which has this role now, or one that is awaited."""
        others = {name: member for name, member in members.items() if name != worker_id}
        started_as = self._started_as.get(worker_id, role)
        self._wanted[started_as] = max(self._wanted.get(started_as, 0) - 1, self._joined(others)[started_as])
        if worker_id in members or not worker_id.startswith(f"{role}{_AWAITED}"):
            self._gone[worker_id] = started_as
            self._started_as.pop(worker_id, None)

    def assign(self, worker_id: str, role: Role) -> None:
        """That worker becomes `role`, or stays it after all; the tool knows nothing of it."""
        self._started_as.setdefault(worker_id, OTHER_ROLE[role])

    def awaited(self, members: Mapping[str, Member]) -> dict[str, Role]:
        """Workers that are wanted and have not joined, by a name that none has that has."""
        joined = self._joined(members)
        found: dict[str, Role] = {}
        for role, wanted in self._wanted.items():
            names = (name for i in count(1) if (name := f"{role}{_AWAITED}{i}") not in members)
            found |= {next(names): role for _ in range(wanted - joined[role])}
        return found

    def _joined(self, members: Mapping[str, Member]) -> Counter[Role]:
        """Who stays, by the role that they were started as."""
        return Counter(
            self._started_as.get(name, member.role)
            for name, member in members.items()
            if not member.is_leaving
        )

    def num_wanted(self) -> int:
        """Of all roles."""
        return sum(self._wanted.values())

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────

    def next_order(self) -> Order | None:
        """What the tool is to be told now; `done` or `failed` must follow. None: nothing, or it is being told."""
        if self.order is not None:
            return None
        for role, wanted in self._wanted.items():
            if wanted != self._told.get(role, 0):
                gone = tuple(name for name, left in self._gone.items() if left is role)
                self.order = Order(role, wanted, gone)
                return self.order
        return None

    def done(self) -> None:
        """It has been told."""
        order = self._take_order()
        self._told[order.role] = order.count
        self._gone = {name: role for name, role in self._gone.items() if name not in order.gone}

    def failed(self) -> None:
        """It could not be told: what is wanted of that role is what it was told before, so whoever still wants it
        otherwise says so again."""
        role = self._take_order().role
        self._wanted[role] = self._told.get(role, 0)
        self._gone = {name: left for name, left in self._gone.items() if left is not role}

    def _take_order(self) -> Order:
        order, self.order = self.order, None
        if order is None:
            raise InvariantViolation("the end of an order was told that was not given")
        return order
