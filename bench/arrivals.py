"""When requests arrive: seeded streams of offsets, in seconds from the start of the load."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import repeat, takewhile

from twinpool.config import require


class Arrivals(StrEnum):
    """How the gaps between arrivals are distributed."""

    POISSON = "poisson"
    CONSTANT = "constant"


Gap = Callable[[float, random.Random], float]
"""Draws the seconds to the next arrival at a rate per second."""


def poisson_gap(rate_per_s: float, rng: random.Random) -> float:
    """Exponential: arrivals know nothing of each other."""
    return rng.expovariate(rate_per_s)


def constant_gap(rate_per_s: float, _rng: random.Random) -> float:
    """Always the same."""
    return 1 / rate_per_s


def gamma_gap(burstiness: float) -> Gap:
    """Gamma with shape `burstiness`, as in vLLM's benchmark: 1 is Poisson, below come bursts, above even arrivals.

    The variance of the gaps is 1 / burstiness of a Poisson process's. Raises ConfigError if it is not above 0.
    """
    require("--burstiness", burstiness, burstiness > 0, "above 0 (1: a Poisson process)")
    return lambda rate_per_s, rng: rng.gammavariate(burstiness, 1 / (rate_per_s * burstiness))


_GAP: dict[Arrivals, Gap] = {Arrivals.POISSON: poisson_gap, Arrivals.CONSTANT: constant_gap}


def offsets(gap: Gap, rates_per_s: Iterable[float], rng: random.Random) -> Iterator[float]:
    """An offset for each rate: each gap is drawn at the rate of the arrival that it leads to."""
    offset = 0.0
    for rate_per_s in rates_per_s:
        offset += gap(rate_per_s, rng)
        yield offset


def arrival_times(kind: Arrivals, rate_per_s: float, seconds: float, seed: int) -> Iterator[float]:
    """Offsets in (0, seconds), rising, at `rate_per_s` on average; the same ones for the same seed.

    Raises ConfigError if the rate is not above 0.
    """
    require("arrival rate", rate_per_s, rate_per_s > 0, "above 0 requests per second")
    endless = offsets(_GAP[kind], repeat(rate_per_s), random.Random(seed))
    return takewhile(lambda offset: offset < seconds, endless)
