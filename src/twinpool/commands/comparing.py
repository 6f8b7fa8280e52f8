"""What `compare` and `sweep` share: flags for the arms and what all of them get, and how their reports are told."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.commands.dataset_flags import load_tokenizer
from twinpool.config import require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table as Printed

    from twinpool.bench.comparison.arms import Arm
    from twinpool.bench.comparison.stand import Hardware
    from twinpool.bench.comparison.workloads import Model
    from twinpool.bench.reports.model import ArmReport, Fact, Report, Table

EXIT_DONE, EXIT_NO_RESULT, EXIT_INTERRUPTED = 0, 1, 130
PLOT_FORMATS = ("png", "svg", "pdf")
_WIDTH = 140
"""Columns of a table where there is no terminal to tell."""


@dataclass(frozen=True, slots=True)
class Bed:
    """What is the same for all arms, and where and how what is found is told."""

    arms: list[Arm]
    hardware: Hardware
    model: Model
    facts: tuple[Fact, ...]
    settings: tuple[Fact, ...]
    command: str
    folder: Path
    plots: str | None
    has_traces: bool


def add_bed_flags(parser: argparse.ArgumentParser, arms: str, folder: str) -> None:
    """Adds MODEL and the flags that `bed` reads, with these defaults."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="as `twinpool serve` takes it (default: the built-in one)"
    )
    parser.add_argument(
        "--arms", default=arms, metavar="LIST",
        help="what is compared, the first with all others: colocated-whole, colocated-chunked (its token budget is "
        "tuned first), colocated-chunked-TOKENS, 2xcolocated-chunked, 1p1d, 2p3d, hybrid, 2p1d-hybrid, NAME=URL, "
        "NAME=--FLAGS (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("what all arms get")
    group.add_argument("--dtype", default="auto", metavar="NAME", help="as `twinpool serve` takes it")
    group.add_argument("--device", default="auto", metavar="NAME", help="likewise")
    group.add_argument(
        "--kv-tokens", type=int, default=65_536, metavar="N", help="KV of each arm, in tokens (default 65536)"
    )
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="of KV (default 16)")
    group.add_argument("--api-key", metavar="KEY", help="for arms that are URLs")
    group.add_argument(
        "--tokenizer", metavar="NAME", help="that prompts are made with (default: the model's)"
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is random (default 1)")
    told = parser.add_argument_group("result")
    told.add_argument(
        "--output", type=Path, default=Path(folder), metavar="FOLDER",
        help="for reports (HTML and JSON) and the servers' logs (default: ./%(default)s)",
    )  # fmt: skip
    told.add_argument(
        "--plots", choices=PLOT_FORMATS, metavar="FORMAT", help="the charts as files too: png, svg, pdf"
    )
    told.add_argument(
        "--trace", action="store_true", help="each request for https://ui.perfetto.dev too, a file per report"
    )


def bed(args: argparse.Namespace) -> Bed:
    """Reads them. Raises ConfigError, ModelError."""
    from twinpool.bench.comparison.arms import parse_arms
    from twinpool.bench.comparison.stand import Hardware
    from twinpool.bench.comparison.workloads import Model
    from twinpool.bench.reports.model import Fact
    from twinpool.engine.model_config import ModelConfig
    from twinpool.engine.model_files import resolve

    require("--kv-tokens", args.kv_tokens, args.kv_tokens >= 1024, "1024 tokens or more")
    require("--block-size", args.block_size, args.block_size >= 1, "1 token or more")
    longest = ModelConfig.from_dir(resolve(args.model, needs_weights=False).path).max_positions
    model = [args.model] if args.model else []
    return Bed(
        arms=parse_arms(args.arms, longest),
        hardware=Hardware(
            (*model, "--dtype", args.dtype, "--device", args.device), args.kv_tokens, args.block_size
        ),
        model=Model(load_tokenizer(args.tokenizer or args.model), longest),
        facts=_hardware_facts(),
        settings=(
            Fact("model", args.model or "the built-in one"),
            Fact("dtype, device", f"{args.dtype}, {args.device}"),
            Fact("KV of each arm", f"{args.kv_tokens:,} tokens in blocks of {args.block_size}"),
        ),
        command=shlex.join(["twinpool", *sys.argv[1:]]),
        folder=_made(args.output),
        plots=args.plots,
        has_traces=args.trace,
    )


def require_times(args: argparse.Namespace) -> None:
    """Raises ConfigError unless `--minutes` and `--seconds` are times that something can be done in."""
    for flag, value in (("--minutes", args.minutes), ("--seconds", args.seconds)):
        require(flag, value, 0 < value < math.inf, "above 0")


@contextmanager
def ends_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal are taken as Ctrl-C: servers must not outlive who started them."""

    def end(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(text, flush=True)


def tell(same: Bed, name: str, report: Report) -> None:
    """Prints what a report leads with, its arms' figures and its tables, and writes it as NAME.html and more.

    Raises:
        ConfigError: a file cannot be written, or matplotlib is missing.
    """
    from rich.console import Console

    from twinpool.bench.reports.page import write_report
    from twinpool.bench.reports.words import headlines

    say(f"\n{report.title}")
    for line in headlines(report):
        say(f"  {line}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if any(arm.figures for arm in report.arms):
        console.print(_figures(report.arms, report.confidence))
    for table in report.tables:
        console.print(_printed(table))
    written = write_report(same.folder / f"{name}.html", report)
    if same.plots is not None:
        from twinpool.bench.reports.plots import write_plots

        written += write_plots(same.folder / name, f".{same.plots}", report)
    runs = {f"{arm.name}, {number}": run for arm in report.arms for number, run in enumerate(arm.runs, 1)}
    if same.has_traces and runs:
        from twinpool.bench.reports.trace import write_trace

        written.append(same.folder / f"{name}.trace.json")
        write_trace(written[-1], runs)
    say(f"written: {', '.join(map(str, written))}")


def _figures(arms: tuple[ArmReport, ...], confidence: float) -> Printed:
    """Each figure beside those of the other arms."""
    from twinpool.bench.reports.model import Table
    from twinpool.bench.reports.sections import small_samples
    from twinpool.bench.reports.words import NONE, amount, ends

    measures = list(dict.fromkeys(figure.measure for arm in arms for figure in arm.figures))
    rows = []
    for measure in measures:
        values = [next((each.value for each in arm.figures if each.measure == measure), None) for arm in arms]
        rows.append(
            (
                measure.name,
                *(
                    NONE
                    if value is None
                    else f"{amount(value.estimate, measure.unit)} {ends(value, measure.unit)}"
                    for value in values
                ),
            )
        )
    return _printed(
        Table(
            title="Figures",
            columns=("", *(arm.name for arm in arms)),
            rows=tuple(rows),
            note=" ".join(filter(None, (_meaning(arms, confidence), small_samples(arms)))),
        )
    )


def _meaning(arms: tuple[ArmReport, ...], confidence: float) -> str:
    """Of the figures: how many repetitions they are means of, and what stands in brackets, if anything does."""
    from twinpool.bench.reports.words import ends, percent

    repetitions = max(len(arm.runs) for arm in arms)
    if repetitions == 1:
        return "Of one repetition, so without intervals."
    has_ends = any(ends(figure.value, figure.measure.unit) for arm in arms for figure in arm.figures)
    if not has_ends:
        return f"Means over {repetitions} repetitions, which are too few, or differ too much, for intervals."
    return (
        f"Means over {repetitions} repetitions; in brackets {percent(confidence)} intervals of each by itself; without "
        "one, it is not known within its own size."
    )


def _printed(table: Table) -> Printed:
    from rich import box
    from rich.table import Table as Printed
    from rich.text import Text

    shown = Printed(
        title=table.title,
        caption=table.note,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in table.columns:
        shown.add_column(Text(column), overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def _hardware_facts() -> tuple[Fact, ...]:
    import psutil

    from twinpool import __version__
    from twinpool.bench.reports.model import Fact
    from twinpool.coordinator.launch import usable_cores
    from twinpool.engine.processor import processor

    return (
        Fact("processor", processor().name),
        Fact("cores", f"{len(usable_cores())} of {os.cpu_count()}"),
        Fact("memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"),
        Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Fact("twinpool", __version__),
        Fact("python", platform.python_version()),
    )


def _made(folder: Path) -> Path:
    """The folder, in which files can be made. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".writable"
        trial.touch()
        trial.unlink()
    except OSError as exc:
        raise ConfigError(
            f"--output {folder} cannot be written to: {exc.strerror}; name another folder"
        ) from exc
    return folder
