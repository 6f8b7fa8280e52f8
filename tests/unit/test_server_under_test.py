"""How long a server's start is waited for."""

from __future__ import annotations

from twinpool.bench.server_under_test import LONGEST_START_S, StartPatience


def first_given_up(limit_s: float, busy_until_s: float) -> float:
    """When a start is given up whose processes use a whole core until then, looked at every tenth of a second."""
    patience = StartPatience(limit_s, began_at=100.0)
    for tenths in range(0, 20_000):
        seconds = tenths / 10
        if not patience.is_left(100.0 + seconds, min(seconds, busy_until_s)):
            return seconds
    raise AssertionError("it was never given up")


def test_an_idle_start_is_given_up_after_the_limit() -> None:
    assert first_given_up(120.0, busy_until_s=0.0) == 120.0


def test_time_in_which_the_server_works_does_not_count() -> None:
    assert 320.0 <= first_given_up(120.0, busy_until_s=200.0) <= 322.0


def test_a_server_that_works_for_ever_is_given_up_all_the_same() -> None:
    assert first_given_up(120.0, busy_until_s=1e9) == LONGEST_START_S
