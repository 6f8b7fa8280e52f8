"""Live tuning never flaps: whatever predictions say, changes are few, apart, and never break a pool."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tuned import COOL_DOWN_S, World, world

from twinpool.planner.autotune.settings import WorkerBounds
from twinpool.planner.autotune.words import Split

HYSTERESIS = 0.1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), noise=st.floats(0, 0.04), size=st.integers(3, 8))
def test_noise_below_the_hysteresis_never_undoes_a_change(seed: int, noise: float, size: int) -> None:
    """Each prediction is off by up to `noise`, for each layout by another amount: one way there, and no way back."""
    dice = Random(seed)
    truth = {Split(x, size - x): dice.uniform(0.2, 2.0) for x in range(1, size)}
    made = world(lambda split: truth[split] * (1 + dice.uniform(-noise, noise)), present=Split(1, size - 1))
    made.advance(15 * COOL_DOWN_S)
    visited = [Split(1, size - 1), *(split for _, split in made.changes)]
    assert len(set(visited)) == len(visited), "it went back"
    assert_orderly(made)
    best = max(truth.values())
    assert truth[visited[-1]] * (1 + HYSTERESIS) * (1 + noise) / (1 - noise) * 1.03 >= best


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(3, 6))
def test_predictions_that_contradict_themselves_are_followed_ever_more_slowly(seed: int, size: int) -> None:
    """Every prediction praises another layout by far, at random."""
    dice = Random(seed)
    made = world(lambda _: dice.choice((0.5, 5.0)) * dice.uniform(0.9, 1.1), present=Split(1, size - 1))
    made.advance(40 * COOL_DOWN_S)
    assert_orderly(made)
    num_ways_back = 6  # after which cool-downs of 1 + 2 + 4 + … have taken the whole time
    assert len(made.changes) <= (size - 2) + num_ways_back


@settings(max_examples=15, deadline=None)
@given(
    per_pair=st.floats(0.05, 3.0),
    skew=st.floats(0.2, 5.0),
    size=st.integers(2, 10),
    noise=st.floats(0, 0.03),
    seed=st.integers(0, 2**32),
)
@example(per_pair=0.625, skew=3.0, size=2, noise=0.0, seed=0)
def test_the_number_of_workers_settles_and_turns_round_once_at_most(
    per_pair: float, skew: float, size: int, noise: float, seed: int
) -> None:
    """Of steady traffic, whatever a worker serves, and by predictions that are a little off. As many as would suffice
    if each did what one does now may be more than suffice; then the rest end, and none is started again."""
    dice = Random(seed)
    made = world(
        lambda split: per_pair * min(split.prefill, skew * split.decode) * (1 + dice.uniform(-noise, noise)),
        present=Split(1, size - 1),
        workers=WorkerBounds(2, 12),
    )
    made.advance(40 * COOL_DOWN_S)
    sizes = [size, *(split.size for _, split in made.changes)]
    grown = sizes.index(max(sizes))
    assert sizes == [*sorted(sizes[:grown]), *sorted(sizes[grown:], reverse=True)], "it grew again"
    times = [at for at, _ in made.changes]
    assert all(later - earlier >= COOL_DOWN_S for earlier, later in pairwise(times))


def assert_orderly(made: World) -> None:
    times = [at for at, _ in made.changes]
    assert all(later - earlier >= COOL_DOWN_S for earlier, later in pairwise(times))
    assert all(min(split) >= 1 for _, split in made.changes)
