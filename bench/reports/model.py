"""What a report is made of: values that can be saved as JSON, and read again.

Whoever measured fills these in; nothing here computes a metric. Times are seconds, rates per second, shares 0 to 1;
texts are plain (the page escapes them). Whatever is empty has no place on the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from twinpool.bench.serving.record import Run, plain
from twinpool.bench.serving.summary import Window

FORMAT = 1
"""Of the JSON; another number means other fields."""


class Unit(StrEnum):
    """What a figure counts, which decides how it is written."""

    SECONDS = "s"
    REQUESTS_PER_S = "requests/s"
    TOKENS_PER_S = "tokens/s"
    SHARE = "share"
    COUNT = "count"


class Better(StrEnum):
    """Which direction of a measure is the good one."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was measured, like "p99 ITL" in seconds, of which lower is better."""

    name: str
    unit: Unit
    better: Better


class Interval(msgspec.Struct, frozen=True):
    """An estimate and, if known, the ends of its confidence interval (of the report's `confidence`)."""

    estimate: float
    low: float | None = None
    high: float | None = None

    def excludes(self, value: float) -> bool:
        """Whether the interval lies on one side of `value`; an end that is not known may be anywhere."""
        return (self.low is not None and self.low > value) or (self.high is not None and self.high < value)


class Figure(msgspec.Struct, frozen=True):
    """One measured value of an arm."""

    measure: Measure
    value: Interval


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of a comparison, or the only one: what it was, what its clients saw, and what that comes to.

    `figures` are the rows of its column in the summary, in the order in which they are to be shown, the same ones for
    every arm. `not_a_result` says why they must not be taken for the server's, like a load generator that was late.
    """

    name: str
    description: str = ""
    """Like "one prefill and one decode worker, a core each"."""
    command: str = ""
    """That started its server."""
    runs: tuple[Run, ...] = ()
    """The repetitions."""
    windows: tuple[Window, ...] = ()
    """What of each run is measured, as many as runs; empty: all requests of all of them."""
    figures: tuple[Figure, ...] = ()
    settings: dict[str, Any] = {}
    """JSON values by name."""
    warnings: tuple[str, ...] = ()
    not_a_result: tuple[str, ...] = ()


class Verdict(StrEnum):
    """What the interval of a difference allows to say."""

    LOWER = "lower"
    HIGHER = "higher"
    NO_DIFFERENCE = "no difference shown"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of two arms over the same requests. `baseline` and `other` are names of arms."""

    measure: Measure
    baseline: str
    other: str
    baseline_value: Interval
    other_value: Interval
    difference: Interval
    """other − baseline."""
    change: Interval
    """other / baseline − 1: −0.42 is 42 % lower. It decides the verdict."""
    num_pairs: int = 0
    """Requests that both arms served."""
    num_repetitions: int = 0

    @property
    def verdict(self) -> Verdict:
        """Lower or higher only if the change's interval excludes 0."""
        if not self.change.excludes(0.0):
            return Verdict.NO_DIFFERENCE
        return Verdict.LOWER if self.change.estimate < 0 else Verdict.HIGHER

    @property
    def is_gain(self) -> bool | None:
        """Whether the other arm is better; None if no difference is shown, or no direction is the good one."""
        if self.verdict is Verdict.NO_DIFFERENCE or self.measure.better is Better.NEITHER:
            return None
        return self.verdict.value == self.measure.better.value


class OutputDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A request that two arms answered differently; the outputs are texts from a little before where they part."""

    index: int
    first_difference: int
    """The first token, or if only texts are known the first character, that is another one."""
    baseline_output: str = ""
    other_output: str = ""


class OutputCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether two arms answered alike. `differences` may be some of `num_different`."""

    baseline: str
    other: str
    num_compared: int
    num_different: int
    differences: tuple[OutputDifference, ...] = ()


class RatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What happened at one request rate."""

    rate: float
    """Requests per second that were offered."""
    goodput: Interval
    """Requests per second that succeeded within every SLO."""
    attainment: float
    """Share of the requests that succeeded within every SLO."""
    holds: bool | None
    """Whether the SLOs count as held at this rate; None: the runs do not say."""
    figures: tuple[Figure, ...] = ()


class RateCurve(msgspec.Struct, frozen=True, kw_only=True):
    """An arm at several rates, ascending; `highest_rate` is the highest at which the SLOs hold."""

    arm: str
    points: tuple[RatePoint, ...]
    highest_rate: Interval | None = None
    """None: it is not known."""
    workload: str = ""
    """Curves of one workload share a chart."""


class Found(StrEnum):
    """What a search for the highest rate came to."""

    HOLDS = "holds at a rate"
    AT_NO_RATE = "holds at no rate that was tried, down to the lowest"
    NOT_KNOWN = "not known: too few runs, or they do not say"
    CONTRADICTORY = "not known: its runs contradict each other"


class Winner(StrEnum):
    """Who holds the SLOs at the higher rate."""

    OTHER = "other"
    BASELINE = "baseline"
    NOBODY_SHOWN = "no difference shown"
    NOBODY_HOLDS = "neither holds at any rate that was tried"
    NOT_KNOWN = "not known"


class MapCell(msgspec.Struct, frozen=True, kw_only=True):
    """One workload and SLO of a win-or-lose map: the highest rate at which each of the two arms holds every SLO."""

    input_tokens: int
    output_tokens: int
    reuse: float
    """Share of the prompt that others have too."""
    slo: str
    """Like "tight TTFT, loose ITL"; cells of one SLO share a panel."""
    baseline_rate: Interval
    """Its estimate is 0 unless it is known to hold at a rate; the ends are the highest rate at which it is known to
    hold (0: none) and the lowest at which it is known to fail."""
    other_rate: Interval
    baseline_found: Found = Found.HOLDS
    other_found: Found = Found.HOLDS
    gain: Interval | None = None
    """other / baseline; None if the baseline is not known to hold at a rate."""

    @property
    def rates(self) -> tuple[tuple[Interval, Found], tuple[Interval, Found]]:
        """The other arm's and the baseline's: the highest rate, and what its search came to."""
        return (self.other_rate, self.other_found), (self.baseline_rate, self.baseline_found)

    @property
    def winner(self) -> Winner:
        """Somebody only if the arm that holds more does so at a rate at which the other one is known to fail, and no
        arm's runs contradict each other."""
        found = {self.baseline_found, self.other_found}
        if Found.CONTRADICTORY in found:
            return Winner.NOBODY_SHOWN
        if found == {Found.AT_NO_RATE}:
            return Winner.NOBODY_HOLDS
        if found == {Found.HOLDS}:
            if self.gain is None or not self.gain.excludes(1.0):
                return Winner.NOBODY_SHOWN
            return Winner.OTHER if self.gain.estimate > 1 else Winner.BASELINE
        if self.other_found is Found.HOLDS and _is_beyond(self.other_rate, self.baseline_rate):
            return Winner.OTHER
        if self.baseline_found is Found.HOLDS and _is_beyond(self.baseline_rate, self.other_rate):
            return Winner.BASELINE
        # Failing at the lowest rate that was tried is known: a search that ended otherwise lacks something.
        return Winner.NOT_KNOWN if Found.NOT_KNOWN in found else Winner.NOBODY_SHOWN


def _is_beyond(holds: Interval, fails: Interval) -> bool:
    """Whether the one holds where the other is known to fail."""
    return holds.low is not None and fails.high is not None and holds.low >= fails.high


class WinLoseMap(msgspec.Struct, frozen=True, kw_only=True):
    """Where `other` sustains more than `baseline`, and where less."""

    baseline: str
    other: str
    cells: tuple[MapCell, ...]
    slos: dict[str, str] = {}
    """What each SLO of the cells is, in figures: "tight TTFT, loose ITL" → "TTFT 200 ms, ITL 100 ms"."""


class GridCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of a grid: what it says, large and small, and how deep its colour is, from 0 to 1; None: pale, as what
    is said was not measured. `is_best` marks it."""

    x: int
    y: int
    large: str
    small: str = ""
    depth: float | None = None
    is_best: bool = False


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A heat map over two whole numbers, like numbers of workers. Places without a cell stay empty."""

    title: str
    x_name: str
    y_name: str
    cells: tuple[GridCell, ...]
    note: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Anything else that is best read as a table, already in words. Columns but the first are aligned right if all of
    their cells begin with a digit or a sign."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Fact(msgspec.Struct, frozen=True):
    """One line of what was measured on, or with."""

    name: str
    value: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one report; what it leads with follows from it (`words.headlines`)."""

    title: str
    created_at: str
    """Wall clock, ISO 8601 with its zone."""
    arms: tuple[ArmReport, ...]
    comparisons: tuple[Comparison, ...] = ()
    output_checks: tuple[OutputCheck, ...] = ()
    curves: tuple[RateCurve, ...] = ()
    maps: tuple[WinLoseMap, ...] = ()
    grids: tuple[Grid, ...] = ()
    tables: tuple[Table, ...] = ()
    num_other_runs: int = 0
    """Measured beside those of the arms, which hold no requests of them; likewise their requests."""
    num_other_requests: int = 0
    findings: tuple[str, ...] = ()
    """Further sentences to lead with, after the verdicts."""
    warnings: tuple[str, ...] = ()
    slo: str = ""
    """Like "TTFT 500 ms, TPOT 50 ms"."""
    hardware: tuple[Fact, ...] = ()
    settings: tuple[Fact, ...] = ()
    commands: tuple[str, ...] = ()
    """That make this report again."""
    confidence: float = 0.95
    format: int = FORMAT


def encode_report(report: Report) -> bytes:
    """As JSON. Raises ValueError for an estimate that is not finite, which JSON could not hold."""
    for what, interval in _intervals(report):
        if not all(
            end is None or math.isfinite(end) for end in (interval.estimate, interval.low, interval.high)
        ):
            raise ValueError(f"{what} is {interval}; wanted: finite numbers")
    return msgspec.json.encode(report, enc_hook=plain)


def decode_report(data: bytes) -> Report:
    """From JSON. Raises msgspec.ValidationError or msgspec.DecodeError."""
    report = msgspec.json.decode(data, type=Report)
    if report.format != FORMAT:
        raise msgspec.ValidationError(f"the report has format {report.format}; this program reads {FORMAT}")
    return report


def _intervals(report: Report) -> Iterator[tuple[str, Interval]]:
    for arm in report.arms:
        yield from ((f"{arm.name}: {row.measure.name}", row.value) for row in arm.figures)
    for each in report.comparisons:
        for value in (each.baseline_value, each.other_value, each.difference, each.change):
            yield f"{each.measure.name} of {each.baseline} and {each.other}", value
    for curve in report.curves:
        yield from ((f"goodput of {curve.arm}", point.goodput) for point in curve.points)
    for cell in (cell for each in report.maps for cell in each.cells):
        known = (each for each in (cell.baseline_rate, cell.other_rate, cell.gain) if each is not None)
        yield from ((f"map cell {cell.input_tokens} × {cell.output_tokens}", each) for each in known)
