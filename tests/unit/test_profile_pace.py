"""What the machine did while a profile was measured is told apart from what the shapes take."""

from __future__ import annotations

import statistics

import pytest

from twinpool.planner.profile.pace import NEAR_S, Turn, paces

USUAL_S = {"decode": 0.02, "short": 0.05, "prompt": 0.1, "long": 0.4}


def measured(pace_of_turn: list[float], apart_s: float = 0.3) -> list[Turn]:
    kinds = list(USUAL_S)
    return [
        Turn(kinds[n % 4], n * apart_s, USUAL_S[kinds[n % 4]] * pace) for n, pace in enumerate(pace_of_turn)
    ]


def test_a_kind_that_was_measured_mostly_in_a_slow_while_is_not_taken_for_a_slow_one() -> None:
    kinds = ["decode", "short"] * 20 + ["decode", "prompt"] * 12 + ["decode", "short", "decode", "prompt"] * 5
    slow = range(40, 64)
    turns = [Turn(kind, 0.3 * n, USUAL_S[kind] * (1.6 if n in slow else 1.0)) for n, kind in enumerate(kinds)]
    found = paces(turns)
    assert found[52] / found[10] == pytest.approx(1.6, rel=0.01)
    assert statistics.fmean(found) == pytest.approx(1)

    def per_usual(kind: str, pace: list[float]) -> float:
        each = [turn.seconds / p for turn, p in zip(turns, pace, strict=True) if turn.kind == kind]
        return statistics.fmean(each) / USUAL_S[kind]

    assert per_usual("prompt", found) == pytest.approx(per_usual("short", found), rel=0.03)
    assert per_usual("prompt", [1.0] * len(turns)) > 1.3 * per_usual("short", [1.0] * len(turns))


def test_a_single_disturbed_step_has_no_say_in_its_own_moment() -> None:
    found = paces(measured([1.0] * 20 + [3.0] + [1.0] * 20))
    assert found == pytest.approx([1.0] * 41)


def test_steps_that_are_far_apart_do_not_tell_of_each_other() -> None:
    assert paces(measured([1.0, 2.0] * 8, apart_s=NEAR_S + 1)) == [1.0] * 16
    assert paces([]) == []
