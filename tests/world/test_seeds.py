"""A thousand seeded runs, in which every wrong variant would be found: whatever goes wrong, every promise is kept."""

from __future__ import annotations

import pytest

from world.runs import first_failure
from world.wrong_variants import MAX_SEEDS

SEEDS_PER_BATCH = 50


@pytest.mark.parametrize("batch", range(MAX_SEEDS // SEEDS_PER_BATCH))
def test_whatever_goes_wrong_nothing_is_lost_doubled_or_leaked(batch: int) -> None:
    failure = first_failure(batch * SEEDS_PER_BATCH, SEEDS_PER_BATCH)
    assert failure is None, failure
