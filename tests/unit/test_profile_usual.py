"""What the machine did while a profile was measured is told apart from what the shapes take."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from twinpool.planner.profile.usual import usual_s

SLOW = 1.8


def test_a_kind_with_more_slow_turns_than_others_is_not_taken_for_a_slow_one() -> None:
    """Each fourth to half of a kind's turns is slow; means are off by up to 12 % from each other."""
    dice = random.Random(1)
    true = {number: 0.02 * 1.1**number for number in range(40)}
    turns = {
        kind: [
            seconds * (SLOW if turn < 3 + kind % 4 else 1) * dice.uniform(0.97, 1.03) for turn in range(12)
        ]
        for kind, seconds in true.items()
    }
    found = usual_s(turns)
    errors = [math.log(found[kind] / true[kind]) for kind in true]
    by_means = [math.log(statistics.fmean(turns[kind]) / true[kind]) for kind in true]
    assert statistics.pstdev(errors) < 0.02 < 0.05 < statistics.pstdev(by_means)
    assert statistics.fmean(errors) == pytest.approx(statistics.fmean(by_means)), "together they are as slow"


def test_what_slows_down_short_steps_less_than_long_ones_is_kept() -> None:
    turns = {seconds: [seconds] * 6 + [seconds * seconds**0.1 * 2] * 6 for seconds in (0.02, 0.05, 0.1, 0.4)}
    means = {seconds: statistics.fmean(each) for seconds, each in turns.items()}
    assert usual_s(turns) == pytest.approx(means, rel=0.01)


def test_of_a_steady_machine_it_is_the_mean() -> None:
    assert usual_s({"one": [0.1, 0.1], "two": [0.3]}) == pytest.approx({"one": 0.1, "two": 0.3})
    assert usual_s({"alone": [0.1, 0.2, 0.3, 0.4]}) == pytest.approx({"alone": 0.25})
    assert usual_s({}) == {}
