"""How far repetitions of one measurement lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> float:
    """The width of the middle half of the values over their median; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle
