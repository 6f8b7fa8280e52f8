"""Gives planned requests their times: an arrival process, or the times that their data has."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from twinpool.bench.arrivals import Gap, constant_gap, gamma_gap, offsets, poisson_gap
from twinpool.bench.serving.workload import PlannedRequest
from twinpool.config import require
from twinpool.errors import ConfigError


class Process(StrEnum):
    """What decides when a request is sent."""

    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"
    BURST = "burst"
    """All at once."""
    REPLAY = "replay"
    """The times in the data."""
    CLOSED = "closed"
    """So many clients, each of which asks again when it has its answer."""


class RampShape(StrEnum):
    """How the rate goes from one to another, request by request."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate of the first and of the last request, per second."""

    shape: RampShape
    start_per_s: float
    end_per_s: float

    def __post_init__(self) -> None:
        for flag, rate in (("--ramp-up-start-rps", self.start_per_s), ("--ramp-up-end-rps", self.end_per_s)):
            require(flag, rate, 0 < rate < math.inf, "above 0 requests per second")

    def rate_per_s(self, index: int, num_requests: int) -> float:
        """The rate at which request `index` follows the one before."""
        progress = index / max(num_requests - 1, 1)
        if self.shape is RampShape.LINEAR:
            return self.start_per_s + (self.end_per_s - self.start_per_s) * progress
        return float(self.start_per_s * (self.end_per_s / self.start_per_s) ** progress)


@dataclass(frozen=True, slots=True)
class Pacing:
    """How a load is paced. With a `ramp` its rates hold and `rate_per_s` does not count."""

    process: Process = Process.BURST
    rate_per_s: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        require("--burstiness", self.burstiness, 0 < self.burstiness < math.inf, "above 0 (1: Poisson)")
        if self._has_rate and self.ramp is None:
            rate = self.rate_per_s
            require("--request-rate", rate, 0 < rate < math.inf, "above 0 requests per second")
        if self.ramp is not None and not self._has_rate:
            raise ConfigError(
                f"a ramp needs arrivals at a rate, not {self.process}: leave one of the two out"
            )

    @property
    def is_open(self) -> bool:
        """Whether each request has a time of its own that it should be sent at."""
        return self.process is not Process.CLOSED

    @property
    def _has_rate(self) -> bool:
        return self.process in (Process.POISSON, Process.GAMMA, Process.CONSTANT)

    def rates_per_s(self, num_requests: int) -> Iterator[float]:
        """The rate for each request."""
        for index in range(num_requests):
            yield self.rate_per_s if self.ramp is None else self.ramp.rate_per_s(index, num_requests)


def schedule(requests: Sequence[PlannedRequest], pacing: Pacing, seed: int) -> list[PlannedRequest]:
    """The requests with their times filled in, earliest first; the same ones for the same seed.

    A replay begins with its earliest request at 0. Where several have one time they stay in order.

    Raises:
        ConfigError: a replay of requests without times.
    """
    match pacing.process:
        case Process.CLOSED:
            times: Sequence[float | None] = [None] * len(requests)
        case Process.BURST:
            times = [0.0] * len(requests)
        case Process.REPLAY:
            times = _replayed(requests)
        case _:
            rates = pacing.rates_per_s(len(requests))
            times = list(offsets(_gap(pacing), rates, random.Random(seed)))
    timed = [msgspec.structs.replace(request, at_s=at) for request, at in zip(requests, times, strict=True)]
    return sorted(timed, key=lambda request: request.at_s or 0.0)


def _gap(pacing: Pacing) -> Gap:
    if pacing.process is Process.GAMMA:
        return gamma_gap(pacing.burstiness)
    return poisson_gap if pacing.process is Process.POISSON else constant_gap


def _replayed(requests: Sequence[PlannedRequest]) -> list[float]:
    times = [request.at_s for request in requests if request.at_s is not None]
    if len(times) < len(requests):
        raise ConfigError(
            f"{len(requests) - len(times)} of {len(requests)} requests have no time to be replayed at; "
            "use data with timestamps, or set --request-rate"
        )
    earliest = min(times, default=0.0)
    return [at - earliest for at in times]
