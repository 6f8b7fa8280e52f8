"""How far predictions are from what was measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.bench.comparison.measures import FIGURES, GOODPUT, Measured, seen
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.slo import Slo

TOLD = ("p50 TTFT", "p99 TTFT", "p50 ITL", "p99 ITL", GOODPUT.measure.name)
MEDIAN_TARGET, WORST_TARGET = 0.10, 0.25


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one load on one layout, in seconds, or requests per second: the geometric mean of all simulated
    runs, and the measured runs', in order."""

    layout: str
    load: str
    figure: str
    predicted: float
    runs: tuple[float, ...]

    @property
    def measured(self) -> float:
        """The geometric mean of the runs."""
        return _mean(self.runs)

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1: the geometric mean of what each run was predicted ÷ what it was. Where both are 0
        there is none; a measured 0 alone is infinitely far."""
        return _ratio(self.predicted, self.measured) - 1

    @property
    def run_errors(self) -> tuple[float, ...]:
        """How far each run is from the mean of all runs of the very same requests."""
        return tuple(_ratio(run, self.measured) - 1 for run in self.runs)

    @property
    def run_spread(self) -> float:
        """How far a run is from their mean, on average."""
        return statistics.fmean(map(abs, self.run_errors))


def _mean(values: Sequence[float]) -> float:
    """The geometric mean, of at least one; 0 if one of them is 0."""
    return statistics.geometric_mean(values) if all(values) else 0.0


def _ratio(value: float, of: float) -> float:
    if of == 0:
        return 1.0 if value == 0 else math.inf
    return value / of


def compare(
    layout: str, load: str, slo: Slo, predicted: Sequence[Sequence[Run]], measured: Sequence[Run]
) -> list[Compared]:
    """All figures of runs of the same requests: of each real one, the simulated ones, as many for each.

    What counts is the geometric mean on either side. Their ratio is the mean one of pairs, each run with its own
    simulations, so a while in which the machine was slow is on both sides. A skewed figure's logarithm is less so: one
    run that took far longer than the others moves it less than it would move their mean.
    """
    theirs = [seen(run, slo) for run in measured]
    ours = [[seen(run, slo) for run in runs] for runs in predicted]
    return [
        Compared(
            layout, load, figure.measure.name,
            _mean([figure.of(run) for runs in ours for run in runs]),
            tuple(map(figure.of, theirs)),
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

    @property
    def are_within_targets(self) -> bool:
        """Whether both hold."""
        return self.median <= MEDIAN_TARGET and self.worst <= WORST_TARGET


def errors_of(compared: Sequence[Compared]) -> Errors:
    """Of at least one."""
    sizes = sorted(abs(each.error) for each in compared)
    worst = max(compared, key=lambda each: abs(each.error))
    return Errors(len(sizes), statistics.median(sizes), percentile(sizes, 90), sizes[-1], worst)


def table(compared: Sequence[Compared]) -> list[str]:
    """Markdown: a row for each load on each layout, "predicted / measured (error, ± how far a run is from the mean of
    its repetitions)" for each figure."""
    rows = ["| layout | load | " + " | ".join(f"{name}{_unit(name)}" for name in TOLD) + " |"]
    rows.append("|---" * (2 + len(TOLD)) + "|")
    for layout, load in dict.fromkeys((each.layout, each.load) for each in compared):
        mine = {each.figure: each for each in compared if (each.layout, each.load) == (layout, load)}
        cells = [f"{_value(mine[name], mine[name].predicted)} / {_value(mine[name], mine[name].measured)} "
                 f"({mine[name].error:+.0%} ±{mine[name].run_spread:.0%})" for name in TOLD]  # fmt: skip
        rows.append(f"| {layout} | {load} | " + " | ".join(cells) + " |")
    return rows


def summary(compared: Sequence[Compared]) -> list[str]:
    """Markdown: the sizes of the errors, for each figure and for all; and, beside them, how far single runs are from
    the mean of all runs of the same requests."""
    rows = [
        "| figure | points | median | p90 | worst | where | single runs: median | p90 | worst |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (*TOLD, "all"):
        mine = [each for each in compared if name in (each.figure, "all")]
        found = errors_of(mine)
        single = sorted(abs(error) for each in mine for error in each.run_errors)
        rows.append(
            f"| {name} | {found.num} | {found.median:.1%} | {found.p90:.1%} | {found.worst:.1%} | "
            f"{found.worst_one.layout}, {found.worst_one.load} | {statistics.median(single):.1%} | "
            f"{percentile(single, 90):.1%} | {single[-1]:.1%} |"
        )
    return rows


def _unit(name: str) -> str:
    return ", /s" if name == GOODPUT.measure.name else ", ms"


def _value(each: Compared, value: float) -> str:
    return f"{value:.2f}" if each.figure == GOODPUT.measure.name else f"{1e3 * value:.1f}"
