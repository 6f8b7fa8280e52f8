"""How far predictions were from what came: of each recommendation, and all together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from twinpool.planner.autotune.words import Figures

KEPT, RECENT = 200, 20
"""Recommendations whose errors make the medians, and the error that changes go by: the latest."""
ATTAINMENT = "attainment"
RELATIVE = ("ttft_p50_s", "ttft_p99_s", "itl_p99_s")


def errors_of(predicted: Figures, measured: Figures) -> dict[str, float]:
    """|predicted ÷ measured − 1| of each time that both have; of the attainment the difference."""
    found = {ATTAINMENT: abs(predicted.attainment - measured.attainment)}
    for name in RELATIVE:
        expected, came = getattr(predicted, name), getattr(measured, name)
        if expected is not None and came is not None and came > 0:
            found[name] = abs(expected / came - 1)
    return found


class Regrets:
    """The errors of the latest recommendations."""

    def __init__(self) -> None:
        self._errors: deque[Mapping[str, float]] = deque(maxlen=KEPT)
        self.num_measured = 0

    def add(self, errors: Mapping[str, float]) -> None:
        """Of one more."""
        self._errors.append(errors)
        self.num_measured += 1

    def medians(self) -> dict[str, float]:
        """By figure, of those that there are."""
        found = {}
        for name in (ATTAINMENT, *RELATIVE):
            if values := [each[name] for each in self._errors if name in each]:
                found[name] = median(values)
        return found

    def median_error(self, latest: int = KEPT) -> float | None:
        """Of all times' relative errors together, of so many recommendations; None before the first."""
        errors = list(self._errors)[-latest:]
        values = [each[name] for each in errors for name in RELATIVE if name in each]
        return median(values) if values else None
