"""How far predictions are from what was measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinpool.bench.comparison.measures import FIGURES, GOODPUT, Measured, seen
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.slo import Slo

TOLD = ("p50 TTFT", "p99 TTFT", "p50 ITL", "p99 ITL", GOODPUT.measure.name)
MEDIAN_TARGET, WORST_TARGET = 0.10, 0.25


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one load on one layout, in seconds, or requests per second: the mean of the simulations', and the
    measured runs', in order."""

    layout: str
    load: str
    figure: str
    predicted: float
    runs: tuple[float, ...]

    @property
    def measured(self) -> float:
        """The mean of the runs."""
        return statistics.fmean(self.runs)

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1. Where both are 0 there is none; a measured 0 alone is infinitely far."""
        return _ratio(self.predicted, self.measured) - 1

    @property
    def repeat_error(self) -> float:
        """How far a run of the same requests is from the run before it: the first one's figure as a prediction of the
        last one's."""
        return _ratio(self.runs[0], self.runs[-1]) - 1


def _ratio(value: float, of: float) -> float:
    if of == 0:
        return 1.0 if value == 0 else math.inf
    return value / of


def compare(
    layout: str, load: str, slo: Slo, predicted: Sequence[Run], measured: Sequence[Run]
) -> list[Compared]:
    """All figures of runs of the same requests, simulated and real ones."""
    ours, theirs = ([seen(run, slo) for run in runs] for runs in (predicted, measured))
    return [
        Compared(
            layout, load, figure.measure.name, statistics.fmean(figure.of(run) for run in ours),
            tuple(figure.of(run) for run in theirs),
        )
        for figure in _figures()
    ]  # fmt: skip


def _figures() -> list[Measured]:
    by_name = {figure.measure.name: figure for figure in FIGURES}
    return [by_name[name] for name in TOLD]


@dataclass(frozen=True, slots=True)
class Errors:
    """Of several comparisons: the sizes of their errors, and the one furthest off."""

    num: int
    median: float
    p90: float
    worst: float
    worst_one: Compared


def errors_of(
    compared: Sequence[Compared], error: Callable[[Compared], float] = lambda each: each.error
) -> Errors:
    """Of at least one."""
    sizes = sorted(abs(error(each)) for each in compared)
    worst = max(compared, key=lambda each: abs(error(each)))
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
    """Markdown: the sizes of the errors, for each figure and for all; and, beside them, of one run as a prediction of
    the next run of the same requests."""
    rows = [
        "| figure | points | median | p90 | worst | where | a run of the next: median | p90 | worst |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (*TOLD, "all"):
        mine = [each for each in compared if name in (each.figure, "all")]
        found, repeated = errors_of(mine), errors_of(mine, lambda each: each.repeat_error)
        rows.append(
            f"| {name} | {found.num} | {found.median:.1%} | {found.p90:.1%} | {found.worst:.1%} | "
            f"{found.worst_one.layout}, {found.worst_one.load} | {repeated.median:.1%} | {repeated.p90:.1%} | "
            f"{repeated.worst:.1%} |"
        )
    return rows


def _unit(name: str) -> str:
    return ", /s" if name == GOODPUT.measure.name else ", ms"


def _value(each: Compared, value: float) -> str:
    return f"{value:.2f}" if each.figure == GOODPUT.measure.name else f"{1e3 * value:.1f}"
