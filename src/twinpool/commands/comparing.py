"""What `compare` and `sweep` share: flags for the arms and what all of them get, and how their reports are told."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.commands.dataset_flags import load_tokenizer
from twinpool.config import require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

    from twinpool.bench.comparison.arms import Arm
    from twinpool.bench.comparison.stand import Hardware
    from twinpool.bench.reports.model import Fact, Report

EXIT_DONE, EXIT_NO_RESULT, EXIT_INTERRUPTED = 0, 1, 130
_WIDTH = 160
"""Columns of a table where there is no terminal to tell."""


@dataclass(frozen=True, slots=True)
class Bed:
    """What is the same for all arms, and where what is found goes."""

    arms: list[Arm]
    hardware: Hardware
    max_model_len: int
    tokenizer: tokenizers.Tokenizer
    folder: Path
    facts: tuple[Fact, ...]
    command: str


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
    parser.add_argument(
        "--output", type=Path, default=Path(folder), metavar="FOLDER",
        help="for reports (HTML and JSON) and the servers' logs (default: ./%(default)s)",
    )  # fmt: skip


def bed(args: argparse.Namespace) -> Bed:
    """Reads them. Raises ConfigError, ModelError."""
    from twinpool.bench.comparison.arms import parse_arms
    from twinpool.bench.comparison.stand import Hardware
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
        max_model_len=longest,
        tokenizer=load_tokenizer(args.tokenizer or args.model),
        folder=_made(args.output),
        facts=_facts(),
        command=shlex.join(["twinpool", *sys.argv[1:]]),
    )


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(text, flush=True)


def tell(folder: Path, report: Report) -> None:
    """Prints what a report leads with and its tables, and writes it as a page and as JSON."""
    from rich.console import Console
    from rich.table import Table

    from twinpool.bench.reports.page import write_report
    from twinpool.bench.reports.words import headlines

    say(f"\n{report.title}")
    for line in headlines(report):
        say(f"  {line}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in report.tables:
        shown = Table(*table.columns, title=table.title, caption=table.note, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    written = write_report(folder / f"{report.title.partition(':')[0]}.html", report)
    say(f"written: {', '.join(map(str, written))}")


def _facts() -> tuple[Fact, ...]:
    from twinpool import __version__
    from twinpool.bench.reports.model import Fact
    from twinpool.coordinator.launch import usable_cores
    from twinpool.engine.processor import processor

    return (
        Fact("processor", processor().name),
        Fact("cores", str(len(usable_cores()))),
        Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Fact("twinpool", __version__),
        Fact("python", platform.python_version()),
    )


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--output {folder} cannot be made: {exc.strerror}; name another folder") from exc
    return folder
