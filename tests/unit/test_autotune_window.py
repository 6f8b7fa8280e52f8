"""What live tuning knows of the traffic: the requests of a window, and what becomes of incomplete and refused ones."""

from __future__ import annotations

import pytest
from support.tuned import SLO, WINDOW_S

from twinpool.coordinator.routing import CHUNK_TOKENS
from twinpool.planner.autotune.window import ENOUGH_REQUESTS, LEAST_REQUESTS, Window
from twinpool.planner.autotune.words import (
    Arrived,
    Ended,
    Withdrawn,
)


def served(window: Window, name: str, at: float, num_output: int = 10, prefix: tuple[int, ...] = ()) -> None:
    window.arrived(Arrived(name, 200, prefix), at)
    window.ended(Ended(name, num_output, is_completed=True, ttft_s=0.5), at)


def test_of_too_few_requests_nothing_is_said() -> None:
    window = Window(WINDOW_S, 0.0)
    for number in range(LEAST_REQUESTS - 1):
        served(window, str(number), float(number))
    assert window.traffic(50.0) is None
    served(window, "one more", 50.0)
    traffic = window.traffic(50.0)
    assert traffic is not None
    assert traffic.rate_per_s == pytest.approx(LEAST_REQUESTS / 50)


def test_little_traffic_is_looked_back_for_but_only_so_far() -> None:
    window = Window(WINDOW_S, 0.0)
    for number in range(100):
        served(window, str(number), 4.0 * number)
    traffic = window.traffic(400.0)
    assert traffic is not None
    assert len(traffic.requests) == ENOUGH_REQUESTS
    assert traffic.rate_per_s == pytest.approx(0.25, rel=0.02)
    assert window.traffic(396.0 + WINDOW_S) is None, "nothing came in the last window"


def test_answers_that_are_not_complete_get_the_lengths_of_others() -> None:
    window = Window(WINDOW_S, 0.0)
    for number in range(30):
        served(window, str(number), 1.0, num_output=7)
    for number in range(10):
        window.arrived(Arrived(f"running {number}", 200, ()), 2.0)
    window.ended(Ended("running 0", 0, is_completed=False), 3.0)
    traffic = window.traffic(10.0)
    assert traffic is not None
    assert len(traffic.requests) == 40
    assert {each.output_tokens for each in traffic.requests} == {7}


def test_refusals_by_load_are_traffic_and_others_are_not() -> None:
    window = Window(WINDOW_S, 0.0)
    for number in range(30):
        served(window, str(number), 1.0)
    window.ended(Ended("turned away before its prompt was read", 0, is_completed=False), 2.0)
    window.arrived(Arrived("no quota", 200, ()), 2.0)
    window.withdrawn(Withdrawn("no quota", None))
    window.arrived(Arrived("left", 200, ()), 2.0)
    window.withdrawn(Withdrawn("left", 3))
    traffic = window.traffic(10.0)
    assert traffic is not None
    assert len(traffic.requests) == 32
    assert traffic.requests[-1].output_tokens == 3
    figures, count = window.figures(0.0, 10.0, SLO)
    assert count == 31, "who left says nothing of how well it was served"
    assert figures is not None
    assert figures.attainment == pytest.approx(30 / 31)


def test_what_prompts_share_is_kept_and_what_they_do_not_is_a_length() -> None:
    window = Window(WINDOW_S, 0.0)
    for number in range(30):
        served(window, str(number), 1.0, prefix=(77, 1000 + number))
    traffic = window.traffic(10.0)
    assert traffic is not None
    assert {each.prefix for each in traffic.requests} == {(77,)}
    assert {each.own_tokens for each in traffic.requests} == {200 - CHUNK_TOKENS}
    assert traffic.mean_input == 200
