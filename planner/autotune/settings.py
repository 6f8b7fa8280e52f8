"""Settings of live tuning: frozen, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from twinpool.config import MOST_WORKERS, require

if TYPE_CHECKING:  # the command line has its words from here, and has to be there at once
    from twinpool.bench.serving.slo import Slo

WINDOW_S, COOL_DOWN_S, HYSTERESIS, ATTAINMENT = 60.0, 60.0, 0.10, 0.9
MOST_SECONDS = 86_400.0
LEAST_WORKERS = 2


class WorkerBounds(NamedTuple):
    """How many workers there may be, of both roles together."""

    fewest: int
    most: int

    @classmethod
    def parse(cls, text: str) -> WorkerBounds:
        """Of MIN:MAX. Raises ConfigError."""
        try:
            fewest, most = map(int, text.split(":"))
        except ValueError:
            fewest, most = 0, 0
        require(
            "--autotune-workers",
            text,
            LEAST_WORKERS <= fewest <= most <= MOST_WORKERS,
            f"MIN:MAX, like 3:8, from {LEAST_WORKERS} (one of each role) to {MOST_WORKERS} workers in all",
        )
        return cls(fewest, most)


class Mode(StrEnum):
    """What live tuning may do."""

    OFF = "off"
    ADVISE = "advise"
    ACT = "act"


@dataclass(frozen=True, slots=True)
class AutotuneSettings:
    """When pools are changed, and by what traffic.

    A recommendation is made every half `window_s`, of the traffic of the last `window_s`, and held against what is
    measured in the `window_s` after it. Pools are changed if that gains more than `hysteresis` (a share), at least
    `cool_down_s` after the last change. A share `attainment` of requests is to meet the objectives `slo`. Their number
    stays, unless `workers` says how many there may be.
    """

    mode: Mode
    slo: Slo
    attainment: float = ATTAINMENT
    window_s: float = WINDOW_S
    cool_down_s: float = COOL_DOWN_S
    hysteresis: float = HYSTERESIS
    workers: WorkerBounds | None = None

    def __post_init__(self) -> None:
        require("--attainment", self.attainment, 0 < self.attainment < 1, "between 0 and 1")
        for flag, seconds in (
            ("--autotune-window", self.window_s),
            ("--autotune-cool-down", self.cool_down_s),
        ):
            require(flag, seconds, 1 <= seconds <= MOST_SECONDS, f"1 to {MOST_SECONDS:.0f} seconds")
        require(
            "--autotune-hysteresis",
            self.hysteresis,
            0 < self.hysteresis <= 10,
            "a share, above 0, at most 10",
        )
