"""Predictions for live tuning by the real simulator: which other pools are worth a look, and what they would serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planned import Affine, space

from twinpool.bench.serving.slo import Slo
from twinpool.config import SchedulerConfig
from twinpool.planner.autotune.predicting import Aim, other_size, predict
from twinpool.planner.autotune.words import PastRequest, PastTraffic, Prediction, Sizes, Split
from twinpool.planner.plan.simulated import simulated

AIM = Aim(Slo(ttft_s=2.0, tpot_s=0.08), 0.9)
SPACE = replace(
    space(Affine(fixed_s=0.04, prompt_token_s=2e-3, sequence_s=2e-3), num_blocks=600),
    token_budgets=(),
    prefill=SchedulerConfig(token_budget=512),
    decode=SchedulerConfig(max_num_seqs=16),
)
"""A decode worker writes 222 tokens in a second: about three answers of the traffic below."""


def traffic(rate_per_s: float) -> PastTraffic:
    requests = tuple(PastRequest(number / rate_per_s, (), 50, 70) for number in range(60))
    return PastTraffic(requests, rate_per_s, 50.0, 70.0)


@pytest.mark.parametrize(
    ("size", "capacity", "rate", "found"),
    [
        (4, 10.0, 12.0, 6),  # 12 and a tenth are to be served, 2.5 by each
        (4, 10.0, 9.5, 5),
        (4, 10.0, 100.0, 8),  # twice as many at most
        (6, 10.0, 100.0, 9),
        (9, 10.0, 100.0, None),
        (4, 0.0, 1.0, 5),  # of no capacity nobody can say how many would do
        (4, 10.0, 6.0, 3),  # 7.5 would be left
        (4, 10.0, 7.0, None),
        (3, 10.0, 0.1, None),
        (12, 10.0, 0.1, 11),  # an operator has started more than may be: they are ended one by one
    ],
)
def test_as_many_are_looked_at_as_would_have_room(
    size: int, capacity: float, rate: float, found: int | None
) -> None:
    assert other_size(size, capacity, rate, Sizes(3, 9, 0.1)) == found
    assert other_size(size, capacity, rate, None) is None


def test_too_few_workers_are_told_from_enough_by_simulation() -> None:
    """One prefill and two decode workers serve about six requests in a second."""
    sizes, present = Sizes(2, 8, 0.1), Split(1, 2)

    def predicted(rate_per_s: float) -> Prediction:
        past = traffic(rate_per_s)
        return predict(past, present, SPACE, AIM, simulated, sizes=sizes, replications=1, most_requests=60)

    heavy, light = predicted(9.0), predicted(1.0)
    assert heavy.change is None
    assert heavy.resize is not None
    assert heavy.resize.split.size > 3
    assert heavy.resize.capacity_per_s > 1.3 * heavy.stay.capacity_per_s
    assert light.resize is not None
    assert light.resize.split == Split(1, 1)
    assert 1.2 < light.resize.capacity_per_s < heavy.stay.capacity_per_s
