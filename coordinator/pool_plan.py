"""How to get from the workers that there are to wanted numbers of prefill and decode workers. A pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from twinpool.config import Role
from twinpool.coordinator.registry import OTHER_ROLE
from twinpool.errors import PoolRefused


class ChangeKind(StrEnum):
    """What is done with a worker."""

    ROLE = "role"
    """It takes another role, and keeps its model and its prefix cache."""
    DRAIN = "drain"
    """It ends, when what runs there has ended or gone elsewhere."""
    START = "start"
    """There is one more."""


@dataclass(frozen=True, slots=True)
class PoolChange:
    """One worker's part in a change of the pools. `role` is what it becomes, had, or is started as; one that is to be
    started has no name yet."""

    kind: ChangeKind
    role: Role
    worker_id: str = ""

    def as_json(self) -> dict[str, str]:
        """For the admin endpoint."""
        named = {"worker": self.worker_id} if self.worker_id else {}
        return {"change": self.kind.value, **named, "role": self.role.value}


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker as a plan sees it: `role` is what it has, or is to have. The one with the least `load` is moved first.
    One that `is_settled` has joined and stays where it is; one that `is_changing` comes from the other pool, and is
    left alone; else it has not joined yet. `may_change`: it can take the other role. `is_linked`: requests can run
    there."""

    worker_id: str
    role: Role
    load: tuple[int, int] = (0, 0)
    is_settled: bool = True
    is_changing: bool = False
    may_change: bool = True
    is_linked: bool = True


def changes_to(wanted: Mapping[Role, int], seats: Sequence[Seat]) -> list[PoolChange]:
    """What makes `seats` the `wanted` numbers, each 1 or more: roles change as far as that helps both pools; what is
    missing then is started, what is too much is drained: first what has not joined yet, then what is not linked, then
    the least loaded.

    Raises:
        PoolRefused: too many workers are on their way to a pool already.
    """
    surplus = {
        role: sum(seat.role is role for seat in seats) - wanted[role] for role in (Role.PREFILL, Role.DECODE)
    }
    giver = max(surplus, key=lambda role: surplus[role])
    taker = OTHER_ROLE[giver]
    settled = sorted(
        (seat for seat in seats if seat.role is giver and seat.is_settled),
        key=lambda seat: (seat.is_linked, not seat.may_change, seat.load),
    )
    most = min(surplus[giver], -surplus[taker])
    # One that is there already, the last of these, has to go on while others are only on their way.
    moved = [seat for seat in settled[:-1] if seat.may_change][: max(0, most)]
    changes = [PoolChange(ChangeKind.ROLE, taker, seat.worker_id) for seat in moved]
    surplus[giver] -= len(moved)
    surplus[taker] += len(moved)
    for role, count in surplus.items():
        changes += [PoolChange(ChangeKind.START, role)] * max(0, -count)
        if count > 0:
            rest = [
                seat for seat in seats if seat.role is role and seat not in moved and not seat.is_changing
            ]
            rest.sort(key=lambda seat: (seat.is_settled, seat.is_linked, seat.load))
            num_left = sum(seat.is_settled for seat in rest[count:])
            if len(rest) < count or not num_left:
                raise PoolRefused(
                    f"{count} {role} worker(s) are too many, and all others are only on their way to be one; try again "
                    "when they have come"
                )
            changes += [PoolChange(ChangeKind.DRAIN, role, seat.worker_id) for seat in rest[:count]]
    return changes
