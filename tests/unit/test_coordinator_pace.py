"""What the coordinator predicts from what it has measured."""

from __future__ import annotations

import pytest

from twinpool.coordinator.pace import Pace, PrefillPace, Stays


def steady(pace: Pace, num_departures: int, interval_s: float, num_tokens: int = 50) -> float:
    """So many departures at that interval while others wait; returns the time of the last."""
    now = 0.0
    pace.observe(now, is_waiting=True)
    for _ in range(num_departures):
        now += interval_s
        pace.departed(num_tokens, now)
        pace.observe(now, is_waiting=True)
    return now


def test_steady_departures_are_predicted_exactly() -> None:
    pace = Pace()
    assert pace.seconds_for(1, 10, 0.0) is None
    now = steady(pace, 11, 1.0)
    assert pace.seconds_for(3, 0, now) == pytest.approx(3.0)
    assert pace.seconds_for(3, 0, now + 0.25) == pytest.approx(2.75)


def test_times_in_which_nobody_waits_say_nothing() -> None:
    pace = Pace()
    now = steady(pace, 11, 1.0)
    pace.observe(now, is_waiting=False)
    pace.departed(50, now + 500)
    pace.observe(now + 1000, is_waiting=True)
    assert pace.seconds_for(3, 0, now + 1000) == pytest.approx(3.0)


def test_time_per_token_and_per_request_are_told_apart() -> None:
    pace = Pace()
    now = 0.0
    pace.observe(now, is_waiting=True)
    for num_tokens in (100, 300, 50, 700, 100, 20) * 3:
        pace.departed(num_tokens, now)
        now += 0.2 + num_tokens / 1000
    assert pace.seconds_for(3, 1000, now) == pytest.approx(3 * 0.2 + (1000 + 20) / 1000 - 0.22)


def test_uneven_departures_are_predicted_with_a_margin() -> None:
    pace = Pace()
    now = 0.0
    pace.observe(now, is_waiting=True)
    for i in range(40):
        now += 0.5 if i % 2 else 1.5
        pace.departed(50, now)
    predicted_s = pace.seconds_for(4, 0, now)
    assert predicted_s is not None
    assert 6.0 < predicted_s < 7.0


def test_a_server_that_lets_nobody_go_is_slower_than_its_history_says() -> None:
    pace = Pace()
    now = steady(pace, 11, 1.0)
    before_s, later_s = pace.seconds_for(3, 0, now), pace.seconds_for(3, 0, now + 30)
    assert before_s is not None
    assert later_s is not None
    assert later_s > 2 * before_s
    fresh = Pace()
    fresh.observe(0.0, is_waiting=True)
    assert fresh.seconds_for(2, 0, 0.1) is None
    assert fresh.seconds_for(2, 0, 4.0) == pytest.approx(
        12.0
    )  # half of the first interval has passed, it guesses


def test_who_waits_behind_one_long_prompt_does_not_wait_for_as_long_again_each() -> None:
    pace = Pace()
    pace.departed(8000, 0.0)
    pace.observe(0.0, is_waiting=True)
    short = pace.seconds_for(7, 6 * 40, 6.0)
    assert short == pytest.approx(6.0 + 12.0 * 240 / 8000)
    assert pace.seconds_for(2, 80_000, 6.0) == pytest.approx(6.0 + 12.0)


def test_what_requests_took_says_when_some_will_have_left_before_anybody_waited() -> None:
    stays = Stays()
    assert stays.seconds_until_left(1, 1) is None
    stays.observe(2.0)
    stays.observe(4.0)
    assert stays.seconds_until_left(4, 2) == pytest.approx(6.0)
    assert stays.seconds_until_left(1, 0) == pytest.approx(3.0)


@pytest.mark.parametrize("slow_s", [0.05, 20.0])
def test_the_pace_follows_the_server_within_some_departures(slow_s: float) -> None:
    pace = Pace()
    now = steady(pace, 200, 1.0)
    for _ in range(1500):
        now += slow_s
        pace.departed(50, now)
    predicted_s = pace.seconds_for(1, 0, now)
    assert predicted_s is not None
    assert slow_s <= predicted_s < 1.5 * slow_s + 1e-9


def test_prompts_take_what_a_line_through_the_measured_ones_says() -> None:
    pace = PrefillPace()
    assert pace.seconds_for(1000) == 0.0
    assert pace.seconds_before(1000) == 0.0
    pace.computed(100, 0.5)
    assert pace.seconds_for(50) == pytest.approx(0.25)
    assert pace.seconds_for(5000) == pytest.approx(0.5)  # at least as long as a shorter one
    pace.computed(1100, 1.5)
    assert pace.seconds_for(2100) == pytest.approx(2.5)
    assert pace.seconds_before(600) == pytest.approx(1.0)
    assert pace.least_seconds_for(1100) == pytest.approx(1.5)
