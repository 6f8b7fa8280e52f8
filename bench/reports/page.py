"""The report as one HTML file: nothing is loaded from anywhere, and no text that it shows is taken for markup."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from twinpool import __version__
from twinpool.bench.reports import sections
from twinpool.bench.reports.charts import Series, arm_class, dashes, distribution_chart, rate_chart
from twinpool.bench.reports.grid import grid_table
from twinpool.bench.reports.heat_map import map_panels
from twinpool.bench.reports.markup import Child, Markup, tag, text_of
from twinpool.bench.reports.measured import Measured, measured
from twinpool.bench.reports.model import RateCurve, Report, encode_report
from twinpool.bench.reports.timeline import timeline_data
from twinpool.errors import ConfigError


def write_report(path: Path, report: Report, json_path: Path | None = None) -> list[Path]:
    """Writes the page to `path` and the same as JSON to `json_path`, by default under the same name; returns both.

    Raises:
        ConfigError: a file cannot be written.
        ValueError: an estimate is not finite.
    """
    beside = path.with_suffix(".json") if json_path is None else json_path
    _write(beside, encode_report(report))
    _write(path, page(report, beside.name).encode())
    return [path, beside]


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written: {exc.strerror}; name a file in a folder that exists"
        ) from exc


def page(report: Report, json_name: str = "") -> str:
    """The whole page. `json_name` is the file beside it that holds the same as JSON."""
    arms = measured(report.arms)
    places = {arm.name: number for number, arm in enumerate(report.arms)}
    body = tag(
        "main",
        sections.head(report),
        sections.headline_list(report),
        _section("Summary", sections.summary_table(report.arms, report.confidence)),
        _section("Differences", sections.comparison_table(report.comparisons, report.confidence)),
        _section("Distributions", _distributions(arms)),
        _section("Goodput against request rate", _curves(report.curves, places)),
        _section("Where splitting wins, and where it loses", *map(map_panels, report.maps)),
        _section("Timeline", _timeline(report)),
        _section("Stages before the first token", sections.stage_table(arms)),
        _section("By length and group", sections.bucket_table(arms)),
        *(_section(grid.title, grid_table(grid)) for grid in report.grids),
        *(_section(table.title, sections.plain_table(table)) for table in report.tables),
        _section("Answers that differ", sections.differences(report.output_checks)),
        _section("How requests ended", sections.ending_table(arms)),
        _section("What was compared", sections.arm_facts(report.arms)),
        _section("Measured on", sections.facts(report.hardware)),
        _section("Settings", sections.facts(report.settings)),
        _section("Make this report again", *(tag("pre", command) for command in report.commands)),
        _foot(json_name),
    )
    script = _asset("timeline.js") if _has_timeline(report) else ""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"twinpool {__version__}"),
        tag("title", report.title),
        Markup('<link rel="icon" href="data:,">'),
        tag("style", Markup(_asset("page.css"))),
    )
    scripts = tag("script", Markup(script)) if script else ""
    return "<!doctype html>\n" + tag("html", head, tag("body", body, scripts), lang="en") + "\n"


def _section(title: str, *content: Child) -> Markup:
    """A heading and what is below it; nothing if there is nothing below it."""
    inside = text_of(*content)
    return tag("section", tag("h2", title), inside) if inside else Markup()


def _distributions(arms: Sequence[Measured]) -> Markup | None:
    drawn = []
    for title, values in (
        ("TTFT", [Series(each.arm.name, each.number, each.ttft_s) for each in arms]),
        ("ITL", [Series(each.arm.name, each.number, each.itl_s) for each in arms]),
    ):
        chart = distribution_chart(title, values)
        if chart is not None:
            drawn.append(tag("figure", tag("h3", title), chart))
    if not drawn:
        return None
    return text_of(
        _legend([(each.number, each.arm.name) for each in arms]),
        tag("div", *drawn, class_="charts"),
        tag("p", *sections.distribution_notes(arms), class_="soft"),
        sections.distribution_table(arms),
    )


def _curves(curves: Sequence[RateCurve], places: dict[str, int]) -> Markup | None:
    if not curves:
        return None
    ordered = sorted(curves, key=lambda curve: curve.workload)
    drawn = []
    for workload, group in groupby(ordered, key=lambda curve: curve.workload):
        numbered = [(places.get(curve.arm, number), curve) for number, curve in enumerate(group)]
        chart = rate_chart(numbered)
        if chart is not None:
            drawn.append(tag("figure", tag("h3", workload) if workload else "", chart))
    names = dict.fromkeys(curve.arm for curve in curves)
    legend = _legend([(places.get(name, number), name) for number, name in enumerate(names)])
    note = (
        "Filled dots: every SLO held at that rate; hollow: not; pale: the runs do not say. Bars and bands are "
        "intervals; the vertical line is the highest rate at which every SLO holds. Dotted: a server that keeps every "
        "SLO at any rate."
    )
    return text_of(legend, tag("div", *drawn, class_="charts"), tag("p", note, class_="soft"))


def _legend(arms: Sequence[tuple[int, str]]) -> Markup:
    def swatch(number: int) -> Markup:
        line = tag("line", x1=0, x2=34, y1=5, y2=5, stroke_dasharray=dashes(number))
        return tag("svg", line, viewBox="0 0 34 10", class_=arm_class(number), aria_hidden="true")

    return tag("ul", *(tag("li", swatch(number), name) for number, name in arms), class_="arms")


def _has_timeline(report: Report) -> bool:
    return any(run.requests for arm in report.arms for run in arm.runs)


def _timeline(report: Report) -> Markup | None:
    if not _has_timeline(report):
        return None
    data = timeline_data(report.arms)
    notes = [
        "All arms have one time axis. A server's stages are durations on its own clock, placed from the moment of "
        "sending; what then lies before the first output is “network”. Thin marks are tokens."
    ]
    for count, singular, plural in (
        (data["left_out"], "is left out", "are left out"),
        (data["without_tokens"], "has no marks of tokens", "have no marks of tokens"),
    ):
        if count:
            what = singular if count == 1 else plural
            notes.append(f" {sections.counted(count, 'repetition')} {what}: a page holds only so much.")
    # "<" would end the element early, whatever its type.
    payload = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return text_of(
        tag("p", *notes, class_="soft"),
        tag("div", tag("noscript", "The timeline needs JavaScript."), id="timeline"),
        tag("script", Markup(payload), type="application/json", id="timeline-data"),
    )


def _foot(json_name: str) -> Markup:
    beside = f" Everything here, and each request, is in {json_name} beside this file." if json_name else ""
    return tag("footer", f"Written by twinpool {__version__}.{beside}", class_="soft")


def _asset(name: str) -> str:
    return files("twinpool.bench.reports").joinpath(name).read_text(encoding="utf-8")
