"""`twinpool report`: one page, plots and a trace, from saved results."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from twinpool.config import require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.bench.reports.model import Report
    from twinpool.bench.serving.record import Run


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "report",
        help="one HTML page, plots and a trace, from saved results",
        description="Makes one HTML page that needs no network, with JSON beside it, from one saved report or from "
        "saved runs.",
    )
    parser.add_argument(
        "results",
        nargs="+",
        metavar="[NAME=]RESULT.json",
        help="one report (what `compare` and `sweep` save), or runs; runs of one NAME are repetitions "
        "(default: the file's name)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--title", default="", metavar="TEXT", help="of the page (default: the names)")
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="of runs: the SLO, like ttft:300 tpot:50",
    )
    parser.add_argument(
        "--plots", metavar="FORMAT", help="write the charts as files too, beside the page: png, svg or pdf"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the requests for https://ui.perfetto.dev (all runs in one)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Reads, writes, says what is where.

    Raises:
        ConfigError: a file cannot be read or written, or matplotlib is missing.
    """
    from twinpool.bench.reports.page import write_report
    from twinpool.bench.reports.plots import SUFFIXES, write_plots
    from twinpool.bench.reports.trace import write_trace
    from twinpool.bench.reports.words import headlines

    formats = [suffix.removeprefix(".") for suffix in SUFFIXES]
    require("--plots", args.plots, args.plots in (None, *formats), ", ".join(formats))
    require("-o", str(args.output), args.output.suffix == ".html", "a name that ends in .html")
    report = _report(args)
    for line in headlines(report):
        print(line)
    written = write_report(args.output, report, _json_path(args.output))
    if args.plots is not None:
        written += write_plots(args.output.with_suffix(""), f".{args.plots}", report)
    if args.trace is not None:
        write_trace(args.trace, _runs(report))
        written.append(args.trace)
    print(f"written: {', '.join(map(str, written))}")
    return 0


def _report(args: argparse.Namespace) -> Report:
    from twinpool.bench.reports.model import Report
    from twinpool.bench.reports.saved import read_saved, report_of
    from twinpool.bench.serving.slo import parse_goodput

    slo = parse_goodput(args.goodput)
    runs: list[tuple[str, Run]] = []
    for text in args.results:
        name, path = _named(text)
        found = read_saved(path)
        if isinstance(found, Report):
            require("RESULT", text, len(args.results) == 1, "one report alone, or any number of runs")
            require("--goodput", args.goodput, slo is None, "nothing with a report, which has its SLO")
            return found if not args.title else msgspec.structs.replace(found, title=args.title)
        runs.append((name, found))
    names = list(dict.fromkeys(name for name, _ in runs))
    created_at = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
    return report_of(runs, args.title or ", ".join(names), slo, ", ".join(args.goodput), created_at)


def _json_path(page: Path) -> Path:
    """Beside the page, under its name, unless something else than a report lies there: that is somebody's result."""
    from twinpool.bench.reports.model import Report
    from twinpool.bench.reports.saved import read_saved

    beside = page.with_suffix(".json")
    try:
        is_free = not beside.exists() or isinstance(read_saved(beside), Report)
    except ConfigError:
        is_free = False
    return beside if is_free else page.with_suffix(".report.json")


def _named(text: str) -> tuple[str, Path]:
    """The name and the file of NAME=FILE, or of a FILE alone."""
    name, separator, file = text.partition("=")
    if not separator or Path(text).exists():
        return Path(text).stem, Path(text)
    return name, Path(file)


def _runs(report: Report) -> dict[str, Run]:
    runs = {
        f"{arm.name}, repetition {number}" if len(arm.runs) > 1 else arm.name: run
        for arm in report.arms
        for number, run in enumerate(arm.runs, 1)
    }
    require("--trace", "a file", bool(runs), "results that have requests; these have none")
    return runs
