"""Thousands of seeded runs: whatever goes wrong, every promise is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from world.runs import first_failure
from world.scenario import Scenario, draw
from world.story import Broken
from world.world import World

BATCHES = 20
SEEDS_PER_BATCH = 100


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_goes_wrong_nothing_is_lost_doubled_or_leaked(batch: int) -> None:
    failure = first_failure(batch * SEEDS_PER_BATCH, SEEDS_PER_BATCH)
    assert failure is None, failure


def test_a_one_sided_writer_that_nobody_can_end_is_the_limit_of_these_promises() -> None:
    """A worker that was started by hand, writes into shared memory and is frozen for a lease counts as lost, but nobody
    can make sure that it is dead: when it goes on, it may still write. So seeds have one-sided writers only where the
    server can end them, and this shows that the world sees why."""
    split = [scenario for scenario in map(draw, range(200)) if len(scenario.pools) == 2]
    with pytest.raises(Broken, match=r"I2: .* counts as gone .* but lives and could write"):
        run_all(replace(scenario, is_one_sided=True, is_ours=False) for scenario in split)


def run_all(scenarios: Iterable[Scenario]) -> None:
    """Runs them, one after the other."""
    for scenario in scenarios:
        World(scenario).run()
