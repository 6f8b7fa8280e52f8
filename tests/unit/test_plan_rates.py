"""The highest rate of a made deployment is found in few simulations, and intervals say how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from twinpool.planner.plan.rates import GRID, change_of, highest_rate, interval_of, rate_interval


@pytest.mark.parametrize("start", [0.3, 5.0, 18.0])
def test_the_highest_rate_is_found_from_anywhere_and_interpolated(start: float) -> None:
    found = highest_rate(lambda rate: 1.9 - rate / 10, start=start, most=1000, target=0.9)
    assert found.low <= 10.0 <= found.high
    assert found.high / found.low == pytest.approx(GRID**2, rel=1e-6)
    assert found.rate == pytest.approx(10.0, rel=0.005)


def test_no_rate_beyond_the_bound_is_tried_and_one_that_never_holds_is_0() -> None:
    tried = []

    def share(of: Callable[[float], float]) -> Callable[[float], float]:
        def at(rate: float) -> float:
            tried.append(rate)
            return of(rate)

        return at

    assert highest_rate(share(lambda _: 1.0), start=3.0, most=12.0, target=0.9).rate == 12.0
    assert max(tried) <= 12.0 * GRID
    assert highest_rate(share(lambda _: 0.5), start=3.0, most=12.0, target=0.9).rate == 0.0


def test_what_is_known_of_a_stretch_narrows_the_search_and_is_not_simulated_again() -> None:
    tried: list[float] = []

    def share(rate: float) -> float:
        tried.append(rate)
        return 1.9 - rate / 10

    known = {GRID**place: 1.9 - GRID**place / 10 for place in (60, 76, 79)}
    found = highest_rate(share, start=GRID**70, most=1000, target=0.9, known=known)
    assert found.rate == pytest.approx(10.0, rel=0.005)
    assert len(tried) == found.num_tried == 1, "between 9.45 and 10.3"
    assert highest_rate(share, start=3.0, most=1000, target=0.9, known=known | {GRID**78: 0.8}).num_tried == 0


@pytest.mark.parametrize("capacity", [0.02, 0.5, 3.0, 3.1, 40.0, 900.0])
@pytest.mark.parametrize("start", [0.3, 3.0, 500.0])
def test_a_search_takes_logarithmically_many_simulations(capacity: float, start: float) -> None:
    found = highest_rate(lambda rate: float(rate <= capacity), start=start, most=1000, target=0.9)
    assert found.low <= capacity < found.high
    assert found.num_tried <= 16


def test_intervals_are_students_and_changes_are_paired() -> None:
    found = interval_of([9.0, 10.0, 11.0], 0.9)
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.estimate == pytest.approx(2.920 / math.sqrt(3), abs=1e-3)
    change = change_of([9.0, 10.0, 12.0], [9.9, 11.0, 13.2], 0.9)
    assert change is not None
    assert change.estimate == pytest.approx(0.1)
    assert change.low == pytest.approx(0.1)
    assert change_of([1.0, 0.0], [1.0, 1.0], 0.9) is None
    rose = change_of([10.0, 10.0, 10.0], [10.01, 10.02, 13.0], 0.9)
    assert rose is not None
    assert rose.low is not None
    assert rose.low < -0.1, "all rose, and it may be chance"
    assert rate_interval([0.1, 0.2, 9.0], 0.9).low == 0.0
