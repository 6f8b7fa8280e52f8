"""Arrivals come at the asked rate, and the same ones for the same seed."""

from itertools import pairwise

import pytest

from twinpool.bench.arrivals import Arrivals, arrival_times
from twinpool.errors import ConfigError


@pytest.mark.parametrize("kind", Arrivals)
def test_a_seed_is_one_sequence_that_rises_within_its_time(kind: Arrivals) -> None:
    times = list(arrival_times(kind, 20.0, 30.0, seed=5))
    assert times == list(arrival_times(kind, 20.0, 30.0, seed=5))
    assert all(earlier < later for earlier, later in pairwise(times))
    assert times[0] > 0
    assert times[-1] < 30.0


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert list(arrival_times(Arrivals.CONSTANT, 4.0, 1.1, seed=0)) == [0.25, 0.5, 0.75, 1.0]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = list(arrival_times(Arrivals.POISSON, 50.0, 400.0, seed=1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert variance == pytest.approx(mean**2, rel=0.1), "exponential gaps: the deviation is the mean"


def test_another_seed_is_another_sequence() -> None:
    first, second = (list(arrival_times(Arrivals.POISSON, 5.0, 10.0, seed)) for seed in (1, 2))
    assert first != second


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="arrival rate"):
        arrival_times(Arrivals.POISSON, rate, 1.0, seed=0)
