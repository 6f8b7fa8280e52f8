"""When requests are to be sent: each arrival process, and the times in the data."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from twinpool.bench.serving.arrivals import Pacing, Process, Ramp, RampShape, schedule
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.errors import ConfigError

RATED = (Process.POISSON, Process.GAMMA, Process.CONSTANT)


def requests(count: int, times: list[float] | None = None) -> list[PlannedRequest]:
    return [
        PlannedRequest(
            index=n, prompt="x", input_tokens=1, output_tokens=1, at_s=None if times is None else times[n]
        )
        for n in range(count)
    ]


def times(count: int, pacing: Pacing, seed: int = 1) -> list[float]:
    return [at for request in schedule(requests(count), pacing, seed) if (at := request.at_s) is not None]


def gaps(found: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *found])]


@pytest.mark.parametrize("process", RATED)
def test_arrivals_have_their_rate_and_are_the_same_for_the_same_seed(process: Process) -> None:
    pacing = Pacing(process, 50.0, burstiness=0.5)
    found = times(20_000, pacing)
    assert found == times(20_000, pacing) == sorted(found)
    assert found[-1] == pytest.approx(400.0, rel=0.03)
    if process is not Process.CONSTANT:
        assert found != times(20_000, pacing, seed=2)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    found = gaps(times(20_000, Pacing(Process.GAMMA, 10.0, burstiness)))
    mean = sum(found) / len(found)
    variance = sum((gap - mean) ** 2 for gap in found) / len(found)
    assert mean == pytest.approx(0.1, rel=0.05)
    assert variance == pytest.approx(mean**2 / burstiness, rel=0.15)


@pytest.mark.parametrize(
    ("shape", "rates"), [(RampShape.LINEAR, [1, 2, 3, 4, 5]), (RampShape.EXPONENTIAL, [1, 2, 4, 8, 16])]
)
def test_a_ramp_goes_from_its_first_rate_to_its_last(shape: RampShape, rates: list[float]) -> None:
    ramp = Ramp(shape, rates[0], rates[-1])
    assert gaps(times(5, Pacing(Process.CONSTANT, ramp=ramp))) == pytest.approx([1 / rate for rate in rates])


def test_a_burst_comes_all_at_once_and_a_closed_loop_has_no_times() -> None:
    assert times(3, Pacing()) == [0.0, 0.0, 0.0]
    assert times(3, Pacing(Process.CLOSED)) == []


def test_a_replay_begins_with_its_earliest_request_and_keeps_the_gaps() -> None:
    replayed = schedule(requests(4, [7.0, 5.0, 6.5, 6.5]), Pacing(Process.REPLAY), seed=1)
    assert [(request.index, request.at_s) for request in replayed] == [(1, 0.0), (2, 1.5), (3, 1.5), (0, 2.0)]
    with pytest.raises(ConfigError, match="3 of 3 requests have no time"):
        schedule(requests(3), Pacing(Process.REPLAY), seed=1)


@pytest.mark.parametrize(
    ("pacing", "words"),
    [
        (lambda: Pacing(Process.POISSON), "--request-rate is inf"),
        (lambda: Pacing(Process.POISSON, 0.0), "--request-rate is 0.0"),
        (lambda: Pacing(Process.GAMMA, 1.0, burstiness=0.0), "--burstiness is 0.0"),
        (
            lambda: Pacing(Process.REPLAY, ramp=Ramp(RampShape.LINEAR, 1, 2)),
            "a ramp needs arrivals at a rate",
        ),
        (lambda: Ramp(RampShape.LINEAR, 0, 2), "--ramp-up-start-rps is 0"),
        (lambda: Ramp(RampShape.LINEAR, 1, math.inf), "--ramp-up-end-rps is inf"),
    ],
)
def test_pacings_that_make_no_sense_are_refused_by_name(pacing: type, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pacing()
