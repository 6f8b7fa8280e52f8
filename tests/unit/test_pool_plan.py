"""From the workers that there are to wanted numbers of each: who changes, who is started, who is drained."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from twinpool.config import Role
from twinpool.coordinator.pool_plan import ChangeKind, PoolChange, Seat, changes_to
from twinpool.errors import PoolRefused

P, D = Role.PREFILL, Role.DECODE
ROLE, DRAIN, START = ChangeKind.ROLE, ChangeKind.DRAIN, ChangeKind.START
SETTLED = (Seat("p", P, (2, 9)), Seat("q", P, (1, 4)), Seat("d", D, (3, 1)), Seat("e", D, (0, 0)))


@pytest.mark.parametrize(
    ("wanted", "seats", "changes"),
    [
        ({P: 2, D: 2}, SETTLED, []),
        ({P: 1, D: 3}, SETTLED, [PoolChange(ROLE, D, "q")]),
        ({P: 3, D: 1}, SETTLED, [PoolChange(ROLE, P, "e")]),
        ({P: 4, D: 1}, SETTLED, [PoolChange(ROLE, P, "e"), PoolChange(START, P)]),
        ({P: 1, D: 2}, SETTLED, [PoolChange(DRAIN, P, "q")]),
        ({P: 1, D: 1}, SETTLED, [PoolChange(DRAIN, P, "q"), PoolChange(DRAIN, D, "e")]),
        ({P: 2, D: 3}, SETTLED, [PoolChange(START, D)]),
        # One that comes is not waited for, and the only one that is there does not leave.
        (
            {P: 1, D: 2},
            (Seat("p", P), Seat("new", P, is_settled=False), Seat("d", D)),
            [PoolChange(START, D), PoolChange(DRAIN, P, "new")],
        ),
        # A hybrid keeps its role.
        (
            {P: 1, D: 2},
            (Seat("p", P, may_change=False), Seat("q", P, may_change=False), Seat("d", D)),
            [PoolChange(START, D), PoolChange(DRAIN, P, "p")],
        ),
        (
            {P: 1, D: 2},
            (Seat("p", P, may_change=False), Seat("q", P), Seat("d", D)),
            [PoolChange(ROLE, D, "q")],
        ),
        # Whom no request can reach goes first, however much it has to do, and the last that one can reach stays.
        (
            {P: 1, D: 2},
            (Seat("p", P), Seat("q", P, (2, 9), is_linked=False), Seat("d", D)),
            [PoolChange(ROLE, D, "q")],
        ),
        (
            {P: 1, D: 1},
            (Seat("p", P), Seat("q", P, (2, 9), is_linked=False), Seat("d", D)),
            [PoolChange(DRAIN, P, "q")],
        ),
        (
            {P: 1, D: 2},
            (Seat("p", P), Seat("q", P, is_linked=False, may_change=False), Seat("d", D)),
            [PoolChange(START, D), PoolChange(DRAIN, P, "q")],
        ),
    ],
)
def test_a_plan_moves_the_least_loaded_and_starts_or_drains_the_rest(
    wanted: Mapping[Role, int], seats: tuple[Seat, ...], changes: list[PoolChange]
) -> None:
    found = changes_to(wanted, seats)
    assert sorted(found, key=repr) == sorted(changes, key=repr)


def test_who_comes_from_another_role_is_not_sent_away_meanwhile() -> None:
    seats = (Seat("p", P), Seat("q", P, is_settled=False, is_changing=True), Seat("d", D))
    assert changes_to({P: 2, D: 1}, seats) == []
    with pytest.raises(PoolRefused, match="try again when they have come"):
        changes_to(
            {P: 1, D: 1},
            (
                Seat("q", P, is_settled=False, is_changing=True),
                Seat("r", P, is_settled=False, is_changing=True),
                Seat("d", D),
            ),
        )
