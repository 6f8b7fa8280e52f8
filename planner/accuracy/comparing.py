"""How far predictions are from what was measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.bench.comparison.measures import FIGURES, GOODPUT, Measured, seen
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.slo import Slo

TOLD = ("p50 TTFT", "p99 TTFT", "p50 ITL", "p99 ITL", GOODPUT.measure.name)
MEDIAN_TARGET, WORST_TARGET = 0.10, 0.25


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one load on one layout: seconds, or requests per second."""

    layout: str
    load: str
    figure: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1. Where both are 0 there is none; a measured 0 alone is infinitely far."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else math.inf
        return self.predicted / self.measured - 1


def compare(layout: str, load: str, slo: Slo, predicted: Run, measured: Run) -> list[Compared]:
    """All figures of two runs of the same requests."""
    ours, theirs = seen(predicted, slo), seen(measured, slo)
    return [
        Compared(layout, load, figure.measure.name, figure.of(ours), figure.of(theirs))
        for figure in _figures()
    ]


def _figures() -> list[Measured]:
    by_name = {figure.measure.name: figure for figure in FIGURES}
    return [by_name[name] for name in TOLD]


@dataclass(frozen=True, slots=True)
class Errors:
    """Of several comparisons: sizes of their errors, and the one furthest off."""

    num: int
    median: float
    p90: float
    worst: float
    worst_one: Compared


def errors_of(compared: Sequence[Compared]) -> Errors:
    """Of at least one."""
    sizes = sorted(abs(each.error) for each in compared)
    worst = max(compared, key=lambda each: abs(each.error))
    return Errors(
        len(sizes), statistics.median(sizes), sizes[math.ceil(0.9 * len(sizes)) - 1], sizes[-1], worst
    )


def table(compared: Sequence[Compared]) -> list[str]:
    """Markdown: a row for each load on each layout, "predicted / measured (error)" for each figure."""
    rows = ["| layout | load | " + " | ".join(f"{name}{_unit(name)}" for name in TOLD) + " |"]
    rows.append("|---" * (2 + len(TOLD)) + "|")
    for layout, load in dict.fromkeys((each.layout, each.load) for each in compared):
        mine = {each.figure: each for each in compared if (each.layout, each.load) == (layout, load)}
        cells = [f"{_value(mine[name], mine[name].predicted)} / {_value(mine[name], mine[name].measured)} "
                 f"({mine[name].error:+.0%})" for name in TOLD]  # fmt: skip
        rows.append(f"| {layout} | {load} | " + " | ".join(cells) + " |")
    return rows


def summary(compared: Sequence[Compared]) -> list[str]:
    """Markdown: the sizes of the errors, for each figure and for all."""
    rows = ["| figure | points | median | p90 | worst | where |", "|---|---|---|---|---|---|"]
    for name in (*TOLD, "all"):
        found = errors_of([each for each in compared if name in (each.figure, "all")])
        rows.append(
            f"| {name} | {found.num} | {found.median:.1%} | {found.p90:.1%} | {found.worst:.1%} | "
            f"{found.worst_one.layout}, {found.worst_one.load} |"
        )
    return rows


def _unit(name: str) -> str:
    return ", /s" if name == GOODPUT.measure.name else ", ms"


def _value(each: Compared, value: float) -> str:
    return f"{value:.2f}" if each.figure == GOODPUT.measure.name else f"{1e3 * value:.1f}"
