"""`twinpool compare`: one load on several layouts of the same hardware, interleaved, and what can be said of it."""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings, load_tokenizer
from twinpool.config import require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

    from twinpool.bench.comparison.arms import Arm
    from twinpool.bench.comparison.comparing import MakeLoad
    from twinpool.bench.comparison.stand import Hardware
    from twinpool.bench.reports.model import Fact, Report, Table
    from twinpool.bench.serving.slo import Slo

EXIT_DONE, EXIT_NO_RESULT, EXIT_INTERRUPTED = 0, 1, 130
DEFAULT_ARMS = "colocated-chunked,1p1d"
DATASET, THREE_CUSTOMERS = "dataset", "three-customers"
STORY_BUDGET = 128
_WIDTH = 160
"""Columns of a table where there is no terminal to tell."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "compare",
        help="the same load on several layouts of this machine, and what differs",
        description="Starts a server for each arm, each with the same cores, model, type and KV memory, sends all of "
        "them the same requests, interleaved and again and again, and says what differs: with intervals, or that no "
        "difference is shown. Nothing else should run meanwhile.",
        epilog="Exit status: 0; 1 the load generator was the bottleneck, so there is no result, or a server failed; "
        "2 a setting is wrong; 130 Ctrl-C (what was compared until then is written).",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="as `twinpool serve` takes it (default: the built-in one)"
    )
    parser.add_argument(
        "--arms", default=DEFAULT_ARMS, metavar="LIST",
        help="what is compared, the first with all others: colocated-whole, colocated-chunked (its token budget is "
        "tuned first), colocated-chunked-TOKENS, 2xcolocated-chunked, 1p1d, 2p3d, hybrid, 2p1d-hybrid, NAME=URL, "
        "NAME=--FLAGS (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--workload", default="interference,chat", metavar="LIST",
        help="of interference, chat, three-customers; or `dataset`, what the dataset flags say, at --request-rate "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="for all of it (default 5)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="that one load should last (default 10)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=12, metavar="N", help="most of each load (default 12)"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="of all intervals together"
    )
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="the objective, as `twinpool bench` takes it "
        "(default: multiples of what is undisturbed here)",
    )  # fmt: skip
    parser.add_argument("--request-rate", type=float, metavar="R", help="of --workload dataset, per second")
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="of it (1: Poisson)")
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="of it (default: as many as come in --seconds)"
    )
    parser.add_argument(
        "--dtype", default="auto", metavar="NAME", help="of all arms, as `twinpool serve` takes it"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="of all arms, likewise")
    parser.add_argument(
        "--kv-tokens", type=int, default=65_536, metavar="N", help="KV of each arm, in tokens (default 65536)"
    )
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="TOKENS", help="of all arms (default 16)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="for arms that are URLs")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="that prompts are made with (default: the model's)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is random (default 1)")
    parser.add_argument(
        "--output", type=Path, default=Path("compare"), metavar="FOLDER",
        help="for a report (HTML and JSON) of each workload, and the servers' logs (default: ./compare)",
    )  # fmt: skip
    add_dataset_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compares, prints, writes the reports.

    Raises:
        ConfigError, ModelError: a setting is wrong.
        ServerFault, NoServer, NothingMeasured: a server does not start or answer.
    """
    from twinpool.bench.comparison.arms import parse_arms
    from twinpool.bench.comparison.comparing import Wanted, compare_arms, report
    from twinpool.bench.comparison.scenarios import table, tell, three_customers
    from twinpool.bench.comparison.stand import Interrupted, Stand

    require("--minutes", args.minutes, 0 < args.minutes < math.inf, "above 0")
    require("--seconds", args.seconds, 0 < args.seconds < math.inf, "above 0")
    require("--repetitions", args.repetitions, args.repetitions >= 1, "1 or more")
    require("--confidence", args.confidence, 0.5 < args.confidence < 1, "between 0.5 and 1")
    require("--kv-tokens", args.kv_tokens, args.kv_tokens >= 1024, "1024 tokens or more")
    names = [name.strip() for name in args.workload.split(",") if name.strip()]
    max_model_len = _max_model_len(args.model)
    arms = parse_arms(args.arms, max_model_len)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    makers = _loads(names, args, tokenizer)
    wanted = Wanted(tuple(arms), tuple(makers), args.minutes, args.seed, args.confidence, args.repetitions)
    folder = _made(args.output)
    hardware, facts = _hardware(args), _facts()
    command = shlex.join(["twinpool", *sys.argv[1:]])
    reports: list[Report] = []
    was_interrupted = False
    with Stand(hardware, folder, args.api_key) as stand:
        try:
            if THREE_CUSTOMERS in names:
                told = tell(_untuned(arms), three_customers(max_model_len), stand, tokenizer, args.seed)
                reports.append(_story(table(told), command, facts))
            if makers:
                compared = compare_arms(wanted, stand, tokenizer, _say)
                was_interrupted = any(each.trials.was_interrupted for each in compared)
                reports += [report(each, stand, wanted, command, facts) for each in compared]
        except Interrupted:
            was_interrupted = True
    for each in reports:
        _write(folder, each)
    if was_interrupted:
        _say("interrupted: what was compared until then is above, if anything")
        return EXIT_INTERRUPTED
    return EXIT_NO_RESULT if any(arm.not_a_result for each in reports for arm in each.arms) else EXIT_DONE


def _loads(names: Sequence[str], args: argparse.Namespace, tokenizer: tokenizers.Tokenizer) -> list[MakeLoad]:
    """What makes each workload, but the story. Raises ConfigError."""
    from twinpool.bench.comparison.workloads import LOADS
    from twinpool.bench.serving.slo import parse_goodput

    slo = parse_goodput(args.goodput)
    allowed = (*LOADS, DATASET, THREE_CUSTOMERS)
    makers = []
    for name in names:
        require("--workload", name, name in allowed, ", ".join(allowed))
        if name == DATASET:
            makers.append(_with_slo(_dataset_load(args, tokenizer), slo))
        elif name in LOADS:
            made = partial(LOADS[name], tokenizer, seconds=args.seconds)
            makers.append(_with_slo(made, slo))
    require("--workload", args.workload, bool(names), ", ".join(allowed))
    return makers


def _with_slo(make: MakeLoad, slo: Slo | None) -> MakeLoad:
    """The same load with the objective that the user has given, if any."""
    return make if slo is None else lambda yardstick: replace(make(yardstick), slo=slo)


def _dataset_load(args: argparse.Namespace, tokenizer: tokenizers.Tokenizer) -> MakeLoad:
    from twinpool.bench.comparison.workloads import from_dataset
    from twinpool.bench.serving.arrivals import Pacing, Process

    rate = args.request_rate
    require(
        "--request-rate", rate, rate is not None and 0 < rate < math.inf, "above 0 with --workload dataset"
    )
    settings = dataset_settings(args)
    process = Process.POISSON if args.burstiness == 1 else Process.GAMMA
    count = args.num_prompts or max(4, round(rate * args.seconds))
    pacing = Pacing(process, rate, args.burstiness)
    return lambda yardstick: from_dataset(tokenizer, yardstick, settings, pacing, count)


def _untuned(arms: Sequence[Arm]) -> list[Arm]:
    """For a story of three requests nothing is tuned: the serving default."""
    return [arm.with_token_budget(STORY_BUDGET) if arm.is_tuned else arm for arm in arms]


def _max_model_len(model: str | None) -> int:
    from twinpool.engine.model_config import ModelConfig
    from twinpool.engine.model_files import resolve

    return ModelConfig.from_dir(resolve(model, needs_weights=False).path).max_positions


def _hardware(args: argparse.Namespace) -> Hardware:
    from twinpool.bench.comparison.stand import Hardware

    model = [args.model] if args.model else []
    common = (*model, "--dtype", args.dtype, "--device", args.device)
    return Hardware(common, args.kv_tokens, args.block_size)


def _facts() -> list[Fact]:
    from twinpool import __version__
    from twinpool.bench.reports.model import Fact
    from twinpool.coordinator.launch import usable_cores
    from twinpool.engine.processor import processor

    return [
        Fact("processor", processor().name),
        Fact("cores", str(len(usable_cores()))),
        Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Fact("twinpool", __version__),
        Fact("python", platform.python_version()),
    ]


def _story(told: Table, command: str, facts: Sequence[Fact]) -> Report:
    from twinpool.bench.reports.model import Report

    return Report(
        title=THREE_CUSTOMERS,
        created_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        arms=(),
        tables=(told,),
        hardware=tuple(facts),
        commands=(command,),
    )


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--output {folder} cannot be made: {exc.strerror}; name another folder") from exc
    return folder


def _write(folder: Path, report: Report) -> None:
    """Prints what a report leads with and its tables, and writes it as a page and as JSON."""
    from rich.console import Console
    from rich.table import Table as Shown

    from twinpool.bench.reports.page import write_report
    from twinpool.bench.reports.words import headlines

    _say(f"\n{report.title}")
    for line in headlines(report):
        _say(f"  {line}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in report.tables:
        shown = Shown(*table.columns, title=table.title, caption=table.note, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    written = write_report(folder / f"{report.title.partition(':')[0]}.html", report)
    _say(f"written: {', '.join(map(str, written))}")


def _say(text: str) -> None:
    print(text, flush=True)
