"""Thousands of seeded runs: whatever goes wrong, every promise is kept."""

from __future__ import annotations

import pytest

from world.runs import first_failure

BATCHES = 20
SEEDS_PER_BATCH = 100


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_goes_wrong_nothing_is_lost_doubled_or_leaked(batch: int) -> None:
    failure = first_failure(batch * SEEDS_PER_BATCH, SEEDS_PER_BATCH)
    assert failure is None, failure
