"""What live tuning knows of the traffic: the requests of a window, and what becomes of incomplete and refused ones."""

from __future__ import annotations

import pytest
from support.tuned import SLO, WINDOW_S, World, recommendations, world

from twinpool.coordinator.routing import CHUNK_TOKENS
from twinpool.planner.autotune import window as window_module
from twinpool.planner.autotune.settings import Mode, WorkerBounds
from twinpool.planner.autotune.window import ENOUGH_REQUESTS, LEAST_REQUESTS, MOST_PREDICTED, Window
from twinpool.planner.autotune.words import (
    Arrived,
    Ended,
    Measured,
    Split,
    Withdrawn,
)


def served(window: Window, name: str, at: float, num_output: int = 10, prefix: tuple[int, ...] = ()) -> None:
    window.arrived(Arrived(name, 200, prefix), at)
    window.ended(Ended(name, num_output, is_completed=True, ttft_s=0.5), at)


def test_of_too_few_requests_nothing_is_said() -> None:
    window = Window(WINDOW_S, SLO, 0.0)
    for number in range(LEAST_REQUESTS - 1):
        served(window, str(number), float(number))
    assert window.traffic(50.0) is None
    served(window, "one more", 50.0)
    traffic = window.traffic(50.0)
    assert traffic is not None
    assert traffic.rate_per_s == pytest.approx(LEAST_REQUESTS / 50)


def test_little_traffic_is_looked_back_for_but_only_so_far() -> None:
    window = Window(WINDOW_S, SLO, 0.0)
    for number in range(100):
        served(window, str(number), 4.0 * number)
    traffic = window.traffic(400.0)
    assert traffic is not None
    assert len(traffic.requests) == ENOUGH_REQUESTS
    assert traffic.rate_per_s == pytest.approx(0.25, rel=0.02)
    assert window.traffic(396.0 + WINDOW_S) is None, "nothing came in the last window"


def test_answers_that_are_not_complete_get_the_lengths_of_others() -> None:
    window = Window(WINDOW_S, SLO, 0.0)
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
    window = Window(WINDOW_S, SLO, 0.0)
    for number in range(30):
        served(window, str(number), 1.0)
    window.ended(Ended("turned away before its prompt was read", 0, is_completed=False), 2.0)
    window.arrived(Arrived("no quota", 200, ()), 2.0)
    window.withdrawn(Withdrawn("no quota", None), 2.0)
    window.arrived(Arrived("left", 200, ()), 2.0)
    window.withdrawn(Withdrawn("left", 3), 2.0)
    traffic = window.traffic(10.0)
    assert traffic is not None
    assert len(traffic.requests) == 32
    assert traffic.requests[-1].output_tokens == 3
    figures, count = window.figures(0.0, 10.0)
    assert count == 31, "who left says nothing of how well it was served"
    assert figures is not None
    assert figures.attainment == pytest.approx(30 / 31)


def test_what_prompts_share_is_kept_and_what_they_do_not_is_a_length() -> None:
    window = Window(WINDOW_S, SLO, 0.0)
    for number in range(30):
        served(window, str(number), 1.0, prefix=(77, 1000 + number))
    traffic = window.traffic(10.0)
    assert traffic is not None
    assert {each.prefix for each in traffic.requests} == {(77,)}
    assert {each.own_tokens for each in traffic.requests} == {200 - CHUNK_TOKENS}
    assert traffic.mean_input == 200


def test_while_they_run_requests_get_the_lengths_of_answers_that_took_longer() -> None:
    """Every other answer has 10 tokens and takes half a second, the others have 500 and take 20 s."""
    window = Window(WINDOW_S, SLO, 0.0)
    for second in range(60):
        for name in ("short", "long"):
            window.arrived(Arrived(f"{name} {second}", 200, ()), float(second))
        if second >= 20:
            window.ended(Ended(f"long {second - 20}", 500, is_completed=True, ttft_s=0.5), float(second))
        window.ended(Ended(f"short {second}", 10, is_completed=True, ttft_s=0.5), second + 0.5)
    traffic = window.traffic(59.5)
    assert traffic is not None
    assert [each.output_tokens for each in traffic.requests] == [10, 500] * 60


# ── much traffic ────────────────────────────────────────────────────────────────────────────────────────────


def came(window: Window, since_s: int, until_s: int, rate_per_s: int) -> None:
    for number in range((until_s - since_s) * rate_per_s):
        at = since_s + number / rate_per_s
        served(window, str(at), at)


def busy(made: World, seconds: float, rate_per_s: int) -> None:
    """As `World.advance`, with as many requests a second."""
    for _ in range(int(seconds)):
        for number in range(rate_per_s - 1):
            made._serve(f"{made.now} {number}")
        made.advance(1)


def test_the_rate_is_that_of_the_whole_window_however_much_came() -> None:
    window = Window(WINDOW_S, SLO, 0.0)
    came(window, 0, 30, rate_per_s=100)
    came(window, 30, 60, rate_per_s=40)
    traffic = window.traffic(60.0)
    assert traffic is not None
    assert traffic.rate_per_s == pytest.approx(70, rel=0.01)
    assert len(traffic.requests) == MOST_PREDICTED
    assert traffic.requests[-1].at_s == pytest.approx(MOST_PREDICTED / 40, rel=0.01), "they are the latest"


def test_what_is_forgotten_is_no_time_in_which_nothing_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 requests come each second, and the last 20 s of them are remembered."""
    monkeypatch.setattr(window_module, "MOST_REQUESTS", 2000)
    window = Window(WINDOW_S, SLO, 0.0)
    came(window, 0, 60, rate_per_s=100)
    traffic = window.traffic(60.0)
    assert traffic is not None
    assert traffic.rate_per_s == pytest.approx(100, rel=0.01)
    assert window.load(10.0, 50.0).rate_per_s == pytest.approx(100, rel=0.01)
    figures, count = window.figures(10.0, 50.0)
    assert figures is not None
    assert figures.goodput_per_s == pytest.approx(100, rel=0.01)
    assert count == 1000, "those of 10 s"
    assert window.figures(10.0, 30.0) == (None, 0)
    assert window.is_being_forgotten(10.0)
    assert not window.is_being_forgotten(45.0)


def test_prefixes_are_those_of_the_requests_that_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "MOST_PREDICTED", 70)
    monkeypatch.setattr(window_module, "MOST_PREFIXES", 80)
    window = Window(WINDOW_S, SLO, 0.0)
    for number in range(100):
        served(window, str(number), number / 10, prefix=(77,))
    traffic = window.traffic(10.0)
    assert traffic is not None
    assert [each.prefix for each in traffic.requests] == [(77,)] * 70
    assert sum(bool(each.prefix) for each in window._arrivals) == 80, "others cost no memory"


def test_a_withdrawn_request_is_known_among_those_of_its_time_and_after_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_module, "MOST_REQUESTS", 30)
    window = Window(WINDOW_S, SLO, 0.0)
    window.arrived(Arrived("long ago", 200, ()), 0.0)
    for number in range(30):
        window.arrived(Arrived(str(number), number, ()), 1.0)
        if number % 2:
            window.ended(Ended(str(number), 10, is_completed=True, ttft_s=0.5), 1.0)
    window.withdrawn(Withdrawn("long ago", None), 2.0)
    assert window.load(0.0, 2.0).mean_input == pytest.approx(sum(range(30)) / 30)
    window.withdrawn(Withdrawn("28", None), 2.0)
    window.withdrawn(Withdrawn("10", None), 2.0)
    assert window.load(0.0, 2.0).mean_input == pytest.approx((sum(range(30)) - 38) / 28)


def test_of_a_hundred_requests_a_second_recommendations_are_held_against_what_came() -> None:
    made = world(lambda split: 100.0 * min(split), Mode.ADVISE, served_ttft_s=0.25)
    busy(made, 2 * WINDOW_S, rate_per_s=100)
    assert recommendations(made)[0].rate_per_s == pytest.approx(100, rel=0.05)
    measured = [line for line in made.lines if isinstance(line, Measured)]
    assert measured[0].rate_per_s == pytest.approx(100, rel=0.05)
    assert measured[0].errors["ttft_p50_s"] == pytest.approx(0.2)


def test_a_window_is_measured_before_it_is_forgotten_though_some_of_it_run_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten requests come each second, of which those of a window and a quarter are remembered; one never ends."""
    monkeypatch.setattr(window_module, "MOST_REQUESTS", int(12.5 * WINDOW_S))
    made = world(lambda split: 10.0 * min(split), Mode.ADVISE)
    busy(made, WINDOW_S / 2 + 1, rate_per_s=10)
    made.feed(Arrived("never ends", 300, ()))
    busy(made, 2.5 * WINDOW_S, rate_per_s=10)
    measured = [line for line in made.lines if isinstance(line, Measured)]
    assert measured[0].errors


def test_workers_that_much_traffic_needs_are_not_taken_away() -> None:
    """Eight workers serve 48 requests a second, seven 42, and 40 come."""
    made = world(lambda split: 6.0 * split.size, workers=WorkerBounds(2, 8), present=Split(4, 4))
    busy(made, 4 * WINDOW_S, rate_per_s=40)
    assert recommendations(made)[-1].rate_per_s == pytest.approx(40, rel=0.05)
    assert not made.changes
