"""Which TP degrees a plan tries."""

from __future__ import annotations

import pytest
from support.planned import Affine, kv, requests

from twinpool.errors import ConfigError
from twinpool.planner.plan.kinds import kinds_of
from twinpool.planner.plan.layouts import WorkerKind
from twinpool.planner.plan.traffic import context_for, traffic_of


def holds_from(least: int, degree: int) -> WorkerKind:
    if degree < least:
        raise ConfigError(f"does not fit on {degree}")
    return WorkerKind(Affine(), kv(1000, degree))


@pytest.mark.parametrize(("least", "budget", "found"), [(1, 8, [1, 2, 4]), (2, 8, [2, 4, 8]), (2, 6, [2, 4])])
def test_the_smallest_degrees_that_hold_the_model_are_tried(
    least: int, budget: int, found: list[int]
) -> None:
    assert list(kinds_of(None, budget, lambda degree: holds_from(least, degree))) == found


def test_where_none_does_the_largest_says_why() -> None:
    with pytest.raises(ConfigError, match="does not fit on 2"):
        kinds_of(None, 3, lambda degree: holds_from(8, degree))
    with pytest.raises(ConfigError, match="--budget is 0"):
        kinds_of(None, 0, lambda degree: holds_from(1, degree))


def test_degrees_that_were_asked_for_are_all_tried_and_each_must_hold_it() -> None:
    assert list(kinds_of([4, 8, 16, 32], 2, lambda degree: holds_from(4, degree))) == [4, 8, 16, 32]
    with pytest.raises(ConfigError, match="does not fit on 2"):
        kinds_of([4, 2], 8, lambda degree: holds_from(4, degree))


def test_workers_take_the_longest_request_and_a_quarter_more() -> None:
    assert context_for(traffic_of(requests(input_tokens=1000, output_tokens=100))) == 2048
    assert context_for(traffic_of(requests(input_tokens=700, output_tokens=100))) == 1024
