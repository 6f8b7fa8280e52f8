"""Live tuning: when it acts and when it only tells, and what it says of its own predictions."""

from __future__ import annotations

import pytest
from support.tuned import COOL_DOWN_S, SLO, WINDOW_S, World, forecast, recommendations, world

from twinpool.errors import ConfigError
from twinpool.planner.autotune.caution import MOST_DOUBLINGS, Caution
from twinpool.planner.autotune.regrets import Regrets, errors_of
from twinpool.planner.autotune.settings import AutotuneSettings, Mode
from twinpool.planner.autotune.words import (
    Action,
    Figures,
    Measured,
    NotChanged,
    Objective,
    Predicted,
    Prediction,
    Split,
    Unpredicted,
)


def prompt_heavy(split: Split) -> float:
    """Three prefill workers to one decode worker are best."""
    return float(min(split.prefill, 3 * split.decode))


def measured(of: World) -> list[Measured]:
    return [line for line in of.lines if isinstance(line, Measured)]


# ── acting ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_changes_to_the_best_pools_once_and_stays() -> None:
    made = world(prompt_heavy)
    made.advance(40 * COOL_DOWN_S)
    assert [split for _, split in made.changes] == [Split(3, 1)]
    assert made.present == Split(3, 1)


def test_advise_only_tells() -> None:
    made = world(prompt_heavy, Mode.ADVISE)
    made.advance(5 * WINDOW_S)
    assert not made.changes
    told = recommendations(made)
    assert {line.action for line in told} == {Action.ADVISED}
    assert told[0].change is not None
    assert told[0].change.split == Split(3, 1)
    assert told[0].gain == pytest.approx(0.5)
    assert len([note for note in made.notes if "should become 3P1D" in note]) == 1, "told once, not each time"


@pytest.mark.parametrize(("gain", "acts"), [(0.05, False), (0.0999, False), (0.15, True)])
def test_a_gain_within_the_hysteresis_changes_nothing(gain: float, acts: bool) -> None:
    made = world(lambda split: 1 + gain * (split == Split(3, 1)))
    made.advance(5 * WINDOW_S)
    assert bool(made.changes) is acts
    assert (recommendations(made)[0].action is Action.CHANGED) is acts


def test_intervals_that_overlap_change_nothing() -> None:
    made = world(prompt_heavy, reach=0.25)
    made.advance(5 * WINDOW_S)
    assert not made.changes
    assert recommendations(made)[0].why == "the intervals of both capacities overlap"


def test_nothing_is_changed_for_traffic_that_hardly_uses_the_pools() -> None:
    made = world(lambda split: 100 * prompt_heavy(split))
    made.advance(5 * WINDOW_S)
    assert not made.changes
    assert recommendations(made)[0].why.startswith("only 0% of the capacity is used")


def test_the_objective_is_goodput_where_the_pools_cannot_serve_the_traffic_and_headroom_where_they_can() -> (
    None
):
    """One request comes each second."""
    for capacity, objective in ((0.5, Objective.GOODPUT), (1.5, Objective.HEADROOM)):
        made = world(lambda _, capacity=capacity: capacity)
        made.advance(2 * WINDOW_S)
        assert recommendations(made)[0].objective is objective


def test_of_no_traffic_and_of_one_request_nothing_is_said_and_status_says_what_is_waited_for() -> None:
    made = world(prompt_heavy, period_s=10**9)
    made.advance(5 * WINDOW_S)
    made._serve("the only one")
    made.advance(2 * WINDOW_S)
    assert not made.asked
    assert made.core.status(made.now)["why_nothing"].startswith("it waits for traffic: 20 requests")


def test_when_traffic_ends_recommendations_end() -> None:
    made = world(prompt_heavy, Mode.ADVISE)
    made.advance(5 * WINDOW_S)
    made.period_s = 10**9
    made.advance(WINDOW_S)
    before = made.core.num_recommendations
    made.advance(5 * WINDOW_S)
    assert made.core.num_recommendations == before
    assert "waits for traffic" in made.core.status(made.now)["why_nothing"]


def test_nothing_is_asked_while_workers_are_missing_or_on_their_way() -> None:
    made = world(prompt_heavy, unsettled="decode-1 starts")
    made.advance(5 * WINDOW_S)
    assert not made.asked
    assert "decode-1 starts" in made.core.status(made.now)["why_nothing"]
    made.unsettled = ""
    made.advance(WINDOW_S)
    assert made.changes


def test_a_prediction_of_pools_that_are_no_more_is_dropped() -> None:
    made = world(prompt_heavy, is_answering=False)
    made.advance(WINDOW_S)
    made.present = Split(1, 3)
    made.advance(1)
    answer = Prediction(stay=forecast(Split(2, 2), 1.0), change=forecast(Split(3, 1), 9.0))
    made.feed(Predicted(made.asked[0].ticket, answer))
    assert not made.changes
    assert not made.lines


def test_workers_that_keep_their_role_are_told_of_not_moved() -> None:
    made = world(prompt_heavy, movable=Split(2, 0))
    made.advance(3 * WINDOW_S)
    assert not made.changes
    assert recommendations(made)[0].why.startswith("1 decode workers would have to change, and 0 can")


def test_a_change_that_is_refused_is_told_and_not_tried_again_before_the_cool_down_is_over() -> None:
    made = world(prompt_heavy, obeys_after_s=1e9)
    made.advance(WINDOW_S / 2)
    assert len(made.changes) == 1
    made._wanted = None
    made.feed(NotChanged("the server is stopping"))
    assert any("the server is stopping" in note for note in made.notes)
    made.advance(COOL_DOWN_S - 1)
    assert len(made.changes) == 1


def test_a_failed_prediction_is_told_once() -> None:
    made = world(prompt_heavy, is_answering=False)
    for _ in range(3):
        made.advance(WINDOW_S)
        made.feed(Unpredicted(made.asked[-1].ticket, "--slo ttft=1ms is below the floor"))
    assert made.core.num_unpredicted == 3
    assert len([note for note in made.notes if "below the floor" in note]) == 1


def test_every_way_back_doubles_the_cool_down_and_quiet_undoes_it() -> None:
    here, there = Split(1, 3), Split(3, 1)
    caution, now = Caution(10.0), 100.0
    for number in range(10):
        assert caution.left_s(now) == 0
        caution.changed(here, there, now)
        here, there = there, here
        assert caution.cool_down_s == 10.0 * 2 ** min(number, MOST_DOUBLINGS)
        now += caution.cool_down_s
    now += 100 * caution.cool_down_s
    caution.changed(here, there, now)
    assert caution.cool_down_s == 10.0


# ── its own error ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_gain_within_its_own_recent_error_changes_nothing_and_is_told_in_words() -> None:
    """Half of all TTFTs are predicted to be twice as long as they are; later they are as predicted."""
    praised = [0.0]
    made = world(lambda split: 1 + praised[0] * (split == Split(3, 1)), served_ttft_s=0.1)
    made.advance(5 * WINDOW_S)
    assert made.core.status(made.now)["recent_error"] == pytest.approx(1.0)
    praised[0] = 0.9
    made.advance(2 * WINDOW_S)
    assert not made.changes
    last = recommendations(made)[-1]
    assert last.own_error == pytest.approx(1.0)
    assert last.why == "a gain of 90% is not above the hysteresis of 10% and its own recent error (100%)"
    made.served_ttft_s = 0.2
    made.advance(20 * WINDOW_S)
    assert [split for _, split in made.changes] == [Split(3, 1)]
    changed = next(line for line in recommendations(made) if line.action is Action.CHANGED)
    assert changed.why == (
        "the gain is above the hysteresis of 10% and its own recent error (50%), and the intervals do not overlap"
    )


def test_while_its_own_error_is_not_known_the_hysteresis_decides_and_the_log_says_so() -> None:
    made = world(prompt_heavy)
    made.advance(WINDOW_S)
    assert recommendations(made)[0].own_error is None
    assert "its own recent error (not known yet)" in recommendations(made)[0].why


@pytest.mark.parametrize(
    ("field", "value"), [("prompt_tokens", 500), ("prompt_tokens", 190), ("period_s", 2)]
)
def test_a_prediction_for_other_traffic_than_came_is_no_error(field: str, value: int) -> None:
    made = world(prompt_heavy, Mode.ADVISE, served_ttft_s=0.1)
    made.advance(WINDOW_S / 2)
    setattr(made, field, value)
    made.advance(WINDOW_S + 2)
    first = measured(made)[0]
    assert (first.number, first.errors, first.why) == (1, {}, "other traffic came than was predicted for")
    assert first.figures is not None
    assert made.core.status(made.now)["median_error"] is None


# ── the regret log ──────────────────────────────────────────────────────────────────────────────────────────


def test_each_recommendation_is_held_against_the_window_after_it() -> None:
    made = world(prompt_heavy, Mode.ADVISE, served_ttft_s=0.25)
    made.advance(6 * WINDOW_S)
    first = measured(made)[0]
    assert first.number == 1
    assert first.layout == "2P2D"
    assert first.num_requests == WINDOW_S
    assert first.rate_per_s == pytest.approx(1.0)
    assert first.figures == Figures(
        attainment=1.0, goodput_per_s=1.0, ttft_p50_s=0.25, ttft_p99_s=0.25, itl_p99_s=0.02
    )
    assert first.errors == pytest.approx(
        {"attainment": 0.0, "ttft_p50_s": 0.2, "ttft_p99_s": 0.6, "itl_p99_s": 0.0}
    )
    assert made.core.medians() == pytest.approx(first.errors)
    status = made.core.status(made.now)
    assert status["median_error"] == pytest.approx(0.2)
    assert status["recommended"] == "3P1D"
    numbers = [line.number for line in measured(made)]
    assert numbers == sorted(set(numbers)), "each once"
    assert len(recommendations(made)) - len(numbers) <= 3, "all but those whose window is not over"


def test_after_a_change_the_window_begins_when_the_pools_have_changed() -> None:
    made = world(prompt_heavy, obeys_after_s=20.0, served_ttft_s=0.4)
    made.advance(3 * WINDOW_S)
    changed_at, _ = made.changes[0]
    number = next(line.number for line in recommendations(made) if line.action is Action.CHANGED)
    line = next(line for line in measured(made) if line.number == number)
    assert line.layout == "3P1D"
    assert line.figures is not None
    assert changed_at + 20 + WINDOW_S <= made.now


def test_nothing_is_measured_of_pools_that_somebody_else_has_changed() -> None:
    made = world(prompt_heavy, Mode.ADVISE)
    made.advance(WINDOW_S)
    made.present = Split(1, 3)
    made.advance(2)
    assert measured(made)
    for line in measured(made):
        assert line.figures is None
        assert line.why == "the pools have become 1P3D"
    assert made.core.medians() == {}


def test_errors_of_times_are_relative_and_those_of_the_attainment_differences() -> None:
    found = errors_of(
        Figures(attainment=0.9, goodput_per_s=1, ttft_p50_s=0.3, itl_p99_s=0.01),
        Figures(attainment=0.6, goodput_per_s=1, ttft_p50_s=0.2, ttft_p99_s=0.5),
    )
    assert found == pytest.approx({"attainment": 0.3, "ttft_p50_s": 0.5})
    regrets = Regrets()
    assert regrets.median_error() is None
    for error in (0.1, 0.5, 0.2):
        regrets.add({"ttft_p50_s": error})
    assert regrets.medians() == {"ttft_p50_s": 0.2}


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("window_s", 0.5, "--autotune-window"),
        ("cool_down_s", 0.0, "--autotune-cool-down"),
        ("hysteresis", 0.0, "--autotune-hysteresis"),
        ("attainment", 1.0, "--attainment"),
    ],
)
def test_settings_are_checked(field: str, value: float, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is {value}"):
        AutotuneSettings(Mode.ACT, SLO, **{field: value})
