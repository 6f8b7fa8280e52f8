"""Live tuning with bounds for the number of workers: more are started, and some ended, within them."""

from __future__ import annotations

import pytest
from support.tuned import COOL_DOWN_S, recommendations, world

from twinpool.errors import ConfigError
from twinpool.planner.autotune.settings import WorkerBounds
from twinpool.planner.autotune.words import (
    Action,
    Objective,
    Split,
)


def even(split: Split) -> float:
    """A pair of workers serves 0.3 requests/s."""
    return 0.3 * min(split)


def test_more_are_started_where_as_many_serve_too_little_and_ended_where_fewer_do() -> None:
    """Of a request a second, then of one every four."""
    made = world(even, workers=WorkerBounds(2, 8))
    made.advance(10 * COOL_DOWN_S)
    assert [split for _, split in made.changes] == [Split(4, 4)]
    changed = next(line for line in recommendations(made) if line.action is Action.CHANGED)
    assert changed.why == "as many workers serve 0.6 requests/s at most, and 1 come"
    assert changed.objective is Objective.GOODPUT
    made.period_s = 4
    made.advance(30 * COOL_DOWN_S)
    sizes = [split.size for _, split in made.changes]
    assert sizes == [8, 7, 6, 5, 4], "one after the other, as long as the rest have enough room"
    last = [line for line in recommendations(made) if line.action is Action.CHANGED][-1]
    assert last.objective is Objective.COST
    assert last.why == (
        "fewer workers serve 120% of what comes: above it are twice the hysteresis of 10% and its own recent error (0%)"
    )
    assert any("(cost -20%): fewer workers serve 120%" in note for note in made.notes)


@pytest.mark.parametrize(
    ("bounds", "period_s", "size"),
    [(WorkerBounds(2, 5), 1, 5), (WorkerBounds(4, 8), 10, 4), (WorkerBounds(3, 9), 10, 3)],
)
def test_bounds_hold(bounds: WorkerBounds, period_s: int, size: int) -> None:
    made = world(lambda split: 0.15 * split.size, workers=bounds, period_s=period_s)
    made.advance(60 * COOL_DOWN_S)
    assert made.present.size == size


def test_without_bounds_their_number_stays() -> None:
    made = world(even)
    made.advance(10 * COOL_DOWN_S)
    assert not made.changes


def test_more_workers_that_would_not_serve_more_are_not_started() -> None:
    made = world(lambda _: 0.5, workers=WorkerBounds(2, 8))
    made.advance(10 * COOL_DOWN_S)
    assert not made.changes


@pytest.mark.parametrize("text", ["", "3", "3:", "4:3", "1:3", "2:257", "a:b", "2:3:4", "-2:3"])
def test_bounds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--autotune-workers is .*; allowed: MIN:MAX, like 3:8"):
        WorkerBounds.parse(text)
    assert WorkerBounds.parse("3:8") == WorkerBounds(3, 8)
