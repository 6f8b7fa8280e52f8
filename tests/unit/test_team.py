"""Threads of a team meet at every barrier; one that fails leaves nobody waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from twinpool.kernels.jit import compiled
from twinpool.kernels.team import Team, meet


@compiled
def pass_on(rank: Any, size: Any, gate: Any, cells: Any, rounds: Any) -> None:
    """Each round every rank takes its neighbour's number plus one, which goes wrong if one runs ahead."""
    for _ in range(rounds):
        taken = cells[(rank + 1) % size] + 1
        meet(size, gate)
        cells[rank] = taken
        meet(size, gate)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_rank_runs_ahead_of_a_barrier(size: int) -> None:
    cells = np.zeros(size, np.int64)
    Team(size).run(pass_on, cells, 200)
    assert cells.tolist() == [200] * size


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_leaves_nobody_waiting_and_is_heard(failing: int) -> None:
    def work(rank: int, size: int, gate: Any) -> None:
        if rank == failing:
            raise MemoryError("no memory")
        pass_on(rank, size, gate, np.zeros(size, np.int64), 5)

    with pytest.raises(MemoryError, match="no memory"):
        Team(2).run(work)
