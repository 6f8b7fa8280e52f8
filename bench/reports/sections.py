"""The parts of the page that are words and tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime

from twinpool.bench.reports.charts import forest
from twinpool.bench.reports.markup import Child, Markup, tag, text_of
from twinpool.bench.reports.measured import Measured
from twinpool.bench.reports.model import (
    ArmReport,
    Comparison,
    Fact,
    Interval,
    OutputCheck,
    Report,
    Table,
    Unit,
)
from twinpool.bench.reports.words import (
    NONE,
    Headline,
    amount,
    bracketed,
    ends,
    headlines,
    percent,
    signed_percent,
)
from twinpool.bench.serving.distributions import Distribution
from twinpool.bench.serving.record import Ending
from twinpool.bench.serving.summary import EXPLAINED_WITHIN_S, Bucket, Cohort

_LEAST_SCALE = 0.05
"""A forest plot of smaller changes is not stretched further."""
_MOST_DIFFERENCES = 20
_ENOUGH_FOR_P99 = 100
_FIGURE = re.compile(r"[+−<-]?[\d.,]*\d%?")
_LEVELS: tuple[tuple[str, Callable[[Distribution], float]], ...] = (
    ("p50", lambda found: found.p50),
    ("p90", lambda found: found.p90),
    ("p95", lambda found: found.p95),
    ("p99", lambda found: found.p99),
    ("max", lambda found: found.max),
    ("mean", lambda found: found.mean),
)


def head(report: Report) -> Markup:
    """Title, time and size."""
    num_runs = report.num_other_runs + sum(len(arm.runs) for arm in report.arms)
    num_requests = report.num_other_requests + sum(
        len(run.requests) for arm in report.arms for run in arm.runs
    )
    parts = [_moment(report.created_at), counted(len(report.arms), "arm"), counted(num_runs, "run")]
    parts.append(counted(num_requests, "request"))
    if report.slo:
        parts.append(f"SLO: {report.slo}")
    return tag("header", tag("h1", report.title), tag("p", " · ".join(parts), class_="soft"))


def headline_list(report: Report) -> Markup | None:
    """What the report says, first of all."""
    found = headlines(report)
    changes = [each.comparison.change for each in found if each.comparison is not None]
    widest = max(
        [
            _LEAST_SCALE,
            *(
                abs(end)
                for each in changes
                for end in (each.estimate, each.low, each.high)
                if end is not None
            ),
        ]
    )
    return (
        tag("ul", *(_headline(each, min(widest, 1.0)) for each in found), class_="headlines")
        if found
        else None
    )


def _headline(found: Headline, widest: float) -> Markup:
    subject = tag("b", f"{found.subject}:") if found.subject else ""
    plot = "" if found.comparison is None else forest(found.comparison.change, widest, found.tone.value)
    return tag(
        "li", tag("span", subject, f" {found.text}" if subject else found.text), plot, class_=found.tone.value
    )


def summary_table(arms: Sequence[ArmReport], confidence: float) -> Markup | None:
    """Each figure beside those of the other arms."""
    measures = list(dict.fromkeys(figure.measure for arm in arms for figure in arm.figures))
    if not measures:
        return None
    rows = []
    for measure in measures:
        values = [next((each.value for each in arm.figures if each.measure == measure), None) for arm in arms]
        rows.append([measure.name, *(_value(value, measure.unit) for value in values)])
    has_ends = any(figure.value.low is not None for arm in arms for figure in arm.figures)
    brackets = f"In brackets: {percent(confidence)} confidence intervals." if has_ends else ""
    note = " ".join(filter(None, (brackets, small_samples(arms))))
    return _table(["", *(arm.name for arm in arms)], rows, note)


def small_samples(arms: Sequence[ArmReport]) -> str:
    """That a p99 of few requests is no more than their largest value, if that is so; else empty."""
    counts = [
        sum(record.ending is Ending.COMPLETED for record in run.requests) for arm in arms for run in arm.runs
    ]
    least = min((count for count in counts if count), default=_ENOUGH_FOR_P99)
    if least >= _ENOUGH_FOR_P99:
        return ""
    return (
        f"The p99 of fewer than {_ENOUGH_FOR_P99} values is simply the largest of them; a repetition had as few as "
        f"{least} requests, each with one TTFT, TPOT and E2E."
    )


def comparison_table(comparisons: Sequence[Comparison], confidence: float) -> Markup | None:
    """Values, difference and change of each comparison, with intervals. A column says of which arms, if of several."""
    if not comparisons:
        return None
    pairs = list(dict.fromkeys((each.baseline, each.other) for each in comparisons))
    is_one = len(pairs) == 1
    rows = []
    for each in comparisons:
        row = _comparison(each)
        rows.append(row if is_one else [row[0], f"{each.other} against {each.baseline}", *row[1:]])
    arms = list(pairs[0]) if is_one else ["", "baseline", "other"]
    names = ["", *arms, "difference", "change", "pairs in repetitions", "verdict"]
    baseline, other = pairs[0] if is_one else ("baseline", "other")
    note = f"Differences are {other} − {baseline}, of the same requests; {percent(confidence)} intervals."
    return _table(names, rows, note)


def _comparison(each: Comparison) -> list[Child]:
    unit, change = each.measure.unit, each.change
    between = bracketed(change, signed_percent)
    return [
        each.measure.name,
        _value(each.baseline_value, unit),
        _value(each.other_value, unit),
        text_of("+" if each.difference.estimate > 0 else "", _value(each.difference, unit)),
        text_of(signed_percent(change.estimate), tag("small", between) if between else ""),
        f"{each.num_pairs:,} in {each.num_repetitions}",
        each.verdict.value,
    ]


def distribution_table(arms: Sequence[Measured]) -> Markup | None:
    """Percentiles of each metric by arm."""
    rows: list[list[Child]] = []
    names = list(dict.fromkeys(name for arm in arms for name, _ in arm.distributions))
    for name in names:
        for arm in arms:
            found = dict(arm.distributions).get(name)
            if found is not None:
                cells = [_level(name, of(found), found) for name, of in _LEVELS]
                rows.append([name, arm.arm.name, *cells, f"{found.count:,}"])
    note = (
        "Of completed requests. Percentiles are nearest ranks: values that occurred. “= max”: too few values for such "
        "a percentile to be another one than the largest."
    )
    return _table(["", "", *(level for level, _ in _LEVELS), "values"], rows, note) if rows else None


def _level(name: str, value: float, found: Distribution) -> str:
    """A percentile whose nearest rank is the last one says no more than the maximum."""
    if name.startswith("p") and math.ceil(int(name[1:]) * found.count / 100) >= found.count > 1:
        return "= max"
    return amount(value, Unit.SECONDS)


def distribution_notes(arms: Sequence[Measured]) -> list[str]:
    """What the charts show, and what they cannot show."""
    notes = [
        "Completed requests of all repetitions together. TTFT counts from the intended send time. The upright scale is "
        "that of normal quantiles, so both tails are as wide as the middle; dots are p50, p90 and p99."
    ]
    for each in arms:
        gaps = each.itl_s
        zeros = sum(gap <= 0 for gap in gaps)
        if zeros:
            notes.append(
                f" {percent(zeros / len(gaps))} of the gaps of {each.arm.name} are 0: tokens that came in one chunk. "
                "They count, but lie left of the chart."
            )
    return notes


def stage_table(arms: Sequence[Measured]) -> Markup | None:
    """The server's stages by arm, and how far they are from the client's TTFT."""
    rows: list[list[Child]] = []
    notes = []
    for arm in arms:
        found: dict[str, Distribution] = dict(arm.cohort.stages)
        if arm.cohort.unexplained is not None:
            found["client's TTFT − sum of the stages"] = arm.cohort.unexplained
            count, of = arm.cohort.num_unexplained, arm.cohort.unexplained.count
            notes.append(
                f"{arm.arm.name}: the stages sum to the client's TTFT within {EXPLAINED_WITHIN_S * 1e3:g} ms for "
                f"{of - count:,} of {of:,} requests."
            )
        for name, each in found.items():
            rows.append([name, arm.arm.name, *(_level(level, of(each), each) for level, of in _LEVELS)])
    return (
        _table(["", "", *(level for level, _ in _LEVELS)], _by_first(rows), " ".join(notes)) if rows else None
    )


def bucket_table(arms: Sequence[Measured]) -> Markup | None:
    """TTFT, ITL and TPOT by input length, output length and group; nothing if there is one of each."""
    rows: list[list[Child]] = []
    for arm in arms:
        summary = arm.summary
        kinds: list[list[tuple[str, Cohort]]] = [
            [(f"input {_range(each)}", each.cohort) for each in summary.by_input_length],
            [(f"output {_range(each)}", each.cohort) for each in summary.by_output_length],
            [(f"group {name}", cohort) for name, cohort in summary.by_group.items()],
        ]
        for kind in kinds:
            rows += [[name, arm.arm.name, *_latencies(cohort)] for name, cohort in kind if len(kind) > 1]
    names = ["", "", "requests", "p50 TTFT", "p99 TTFT", "p50 ITL", "p99 ITL", "p50 TPOT"]
    return _table(names, _by_first(rows)) if rows else None


def _by_first(rows: Sequence[list[Child]]) -> list[list[Child]]:
    """Rows of one first cell together, in the order in which they come first."""
    order = {name: place for place, name in enumerate(dict.fromkeys(str(row[0]) for row in rows))}
    return sorted(rows, key=lambda row: order[str(row[0])])


def _range(bucket: Bucket) -> str:
    return f"{bucket.at_least:,} to {bucket.below - 1:,}" if bucket.below else f"from {bucket.at_least:,}"


def _latencies(cohort: Cohort) -> list[str]:
    def level(found: Distribution | None, name: str) -> str:
        return NONE if found is None else amount(getattr(found, name), Unit.SECONDS)

    pairs = ((cohort.ttft_from_intended, "p50"), (cohort.ttft_from_intended, "p99"), (cohort.itl, "p50"),
             (cohort.itl, "p99"), (cohort.tpot, "p50"))  # fmt: skip
    return [f"{cohort.num_requests:,}", *(level(found, name) for found, name in pairs)]


def ending_table(arms: Sequence[Measured]) -> Markup | None:
    """How many requests of each arm ended which way."""
    if not any(arm.requests for arm in arms):
        return None
    rows = [
        [
            arm.arm.name,
            *(f"{arm.cohort.endings[ending.value]:,}" for ending in Ending),
            f"{len(arm.requests):,}",
        ]
        for arm in arms
    ]
    return _table(["", *(ending.value.replace("_", " ") for ending in Ending), "all"], rows)


def plain_table(table: Table) -> Markup:
    """A table that is in words already."""
    return _table(table.columns, table.rows, table.note)


def differences(checks: Sequence[OutputCheck]) -> Markup | None:
    """Where answers part, the first of them."""
    rows = [
        [f"#{each.index}", str(each.first_difference), f"{check.baseline}: {each.baseline_output}",
         f"{check.other}: {each.other_output}"]
        for check in checks
        for each in check.differences
    ]  # fmt: skip
    if not rows:
        return None
    note = f"The first {_MOST_DIFFERENCES} of {len(rows)}." if len(rows) > _MOST_DIFFERENCES else ""
    return _table(["request", "first difference at", "", ""], rows[:_MOST_DIFFERENCES], note)


def arm_facts(arms: Sequence[ArmReport]) -> Markup | None:
    """What each arm was, how its server was started, and its settings."""
    parts: list[Child] = []
    for arm in arms:
        settings = [Fact(name, _setting(value)) for name, value in arm.settings.items()]
        if arm.description or arm.command or settings:
            parts += [tag("h3", arm.name), tag("p", arm.description) if arm.description else ""]
            parts += [tag("pre", arm.command) if arm.command else "", facts(settings) or ""]
    return text_of(*parts) if parts else None


def facts(found: Sequence[Fact]) -> Markup | None:
    """Names and values."""
    pairs = [text_of(tag("dt", fact.name), tag("dd", fact.value)) for fact in found]
    return tag("dl", *pairs) if pairs else None


def _setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value(value: Interval | None, unit: Unit) -> Child:
    if value is None:
        return NONE
    between = ends(value, unit)
    return text_of(amount(value.estimate, unit), tag("small", f" {between}") if between else "")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Child]], note: str = "") -> Markup:
    """Columns but the first are right if all of their cells begin like a figure. Equal first cells show once."""
    places = range(len(columns))
    is_number = [place > 0 and all(_begins_as_figure(row[place]) for row in rows) for place in places]

    def classes(place: int) -> str | None:
        return "number" if is_number[place] else None

    head_cells = [tag("th", name, scope="col", class_=classes(place)) for place, name in enumerate(columns)]
    body = []
    last: Child = None
    for row in rows:
        first = tag("th", "" if row[0] == last else row[0], scope="row")
        body.append(tag("tr", first, *(tag("td", row[place], class_=classes(place)) for place in places[1:])))
        last = row[0]
    table = tag("table", tag("thead", tag("tr", *head_cells)), tag("tbody", *body))
    return text_of(tag("div", table, class_="wide"), tag("p", note, class_="soft") if note else "")


def _begins_as_figure(cell: Child) -> bool:
    """A name like 1P1D does not."""
    first, _, _ = (cell if isinstance(cell, str) else "").partition(" ")
    return first in (NONE, "=") or _FIGURE.fullmatch(first) is not None


def _moment(text: str) -> str:
    try:
        return datetime.fromisoformat(text).strftime("%-d %B %Y, %H:%M %Z").strip()
    except ValueError:
        return text


def counted(count: int, noun: str) -> str:
    """Like "1 run" and "2 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
