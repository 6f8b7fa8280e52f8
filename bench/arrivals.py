"""When requests arrive: seeded streams of offsets, in seconds from the start of the load."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import takewhile

from twinpool.config import require


class Arrivals(StrEnum):
    """How the gaps between arrivals are distributed."""

    POISSON = "poisson"
    CONSTANT = "constant"


def arrival_times(kind: Arrivals, rate_per_s: float, seconds: float, seed: int) -> Iterator[float]:
    """Offsets in (0, seconds), rising, at `rate_per_s` on average; the same ones for the same seed.

    Raises ConfigError if the rate is not above 0.
    """
    require("arrival rate", rate_per_s, rate_per_s > 0, "above 0 requests per second")
    return takewhile(lambda offset: offset < seconds, _offsets(_GAP[kind], rate_per_s, random.Random(seed)))


def _offsets(
    gap: Callable[[float, random.Random], float], rate_per_s: float, rng: random.Random
) -> Iterator[float]:
    offset = 0.0
    while True:
        offset += gap(rate_per_s, rng)
        yield offset


def _poisson_gap(rate_per_s: float, rng: random.Random) -> float:
    return rng.expovariate(rate_per_s)


def _constant_gap(rate_per_s: float, _rng: random.Random) -> float:
    return 1 / rate_per_s


_GAP = {Arrivals.POISSON: _poisson_gap, Arrivals.CONSTANT: _constant_gap}
