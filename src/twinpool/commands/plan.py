"""`twinpool plan`: which layout serves some traffic within its objectives, at what cost."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.commands.bench_serve import command_shown
from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings, load_tokenizer
from twinpool.commands.flags import SCHEDULING, add_flags, config_from
from twinpool.commands.hardware_flags import QUEUE, Hardware, add_hardware_flags, hardware, queue
from twinpool.commands.progress import ProgressLine
from twinpool.commands.results import check_files
from twinpool.config import SchedulerConfig, require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.bench.serving.datasets import DatasetSettings
    from twinpool.planner.plan.layouts import LayoutSpace, WorkerKind
    from twinpool.planner.plan.result import Plan
    from twinpool.planner.plan.traffic import Traffic
    from twinpool.planner.times.roofline import Roofline

EXIT_DONE, EXIT_NO_PLAN, EXIT_INTERRUPTED = 0, 1, 130
_NUM_PROMPTS = 4000
_PREFILL_BUDGET, _COLOCATED_BUDGETS, _NUM_SEQS = 2048, "256,512,1024,2048", 256
_CPU_PREFILL_BUDGET, _CPU_COLOCATED_BUDGETS, _CPU_NUM_SEQS = 512, "64,128,256", 64
_EXAMPLES = """\
examples:
  twinpool plan --model llama-3.1-8b --gpu h100 --dataset-name azure-conversation --slo ttft=2s --slo itl=50ms \\
      --budget 8 --price 4
  twinpool plan --model llama-3.1-70b --gpu h200 --trace requests.jsonl --rate 12 --slo ttft=3s --slo itl=60ms \\
      --budget 16 --report plan.html
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "plan",
        help="how many prefill and decode workers serve some traffic within its objectives, at what cost",
        description="Searches the layouts of a budget of accelerators, colocated ones included: bounds in closed form, "
        "then simulations with the scheduling that serves. Says what binds, what is left, and what it costs.",
        epilog=_EXAMPLES + "\nExit status: 0; 1 no layout meets the objectives; 2 a setting is wrong; 130 Ctrl-C (what "
        "is known by then is told).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--slo", action="append", default=[], metavar="METRIC=TIME",
        help="of each request: ttft, itl (p99 of its gaps), tpot or e2el; like ttft=2s, itl=50ms")  # fmt: skip
    add(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="of requests that must meet them (0.9)"
    )
    add("--budget", type=int, default=8, metavar="N", help="accelerators at most (8)")
    add("--price", type=float, metavar="$/H", help="of one accelerator for an hour")
    add(
        "--rate",
        type=float,
        metavar="R",
        help="requests/s to serve (default: the data's own, if it has times)",
    )
    add(
        "--tp",
        default="auto",
        metavar="LIST",
        help="TP degrees to try, like 1,2 (default: the smallest that fit)",
    )
    add("--colocated-budgets", metavar="LIST",
        help=f"token budgets of colocated workers ({_COLOCATED_BUDGETS}; a CPU {_CPU_COLOCATED_BUDGETS})")  # fmt: skip
    add("--replications", type=int, default=4, metavar="N", help="stretches of the data that decide (4)")
    add("--confidence", type=float, default=0.9, metavar="SHARE", help="of intervals (0.9)")
    add("--effort", type=int, default=60_000, metavar="N", help="requests to simulate, about (60000)")
    add("--seed", type=int, default=0, metavar="N", help="another one: other stretches of the data")
    add("--json", action="store_true", help="print the plan as JSON")
    add(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="write a page with the map of layouts, and JSON beside it",
    )
    add_hardware_flags(parser)
    _add_scheduling_flags(parser)
    _add_traffic_flags(parser)
    return parser


def _add_scheduling_flags(parser: argparse.ArgumentParser) -> None:
    serving = parser.add_argument_group("scheduling, as `twinpool serve` takes it")
    own = ("--token-budget", "--max-num-seqs")
    add_flags(serving, [flag for flag in SCHEDULING if flag.name not in own])
    serving.add_argument("--token-budget", type=int, metavar="TOKENS",
        help=f"of a prefill worker's step ({_PREFILL_BUDGET}; of a CPU {_CPU_PREFILL_BUDGET})")  # fmt: skip
    serving.add_argument("--max-num-seqs", type=int, metavar="N",
        help=f"sequences that a worker decodes together ({_NUM_SEQS}; a CPU {_CPU_NUM_SEQS})")  # fmt: skip
    serving.add_argument(
        "--hybrid", action="store_true", help="workers of both pools also take whole requests"
    )
    serving.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")
    add_flags(serving, QUEUE)


def _add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("traffic")
    data.add_argument(
        "--trace", metavar="FILE", help="requests with times: .jsonl, .csv, or a saved run's .json"
    )
    data.add_argument("--num-prompts", type=int, metavar="N",
        help=f"requests to take (default: all of a file, {_NUM_PROMPTS:,} of others)")  # fmt: skip
    data.add_argument(
        "--tokenizer", metavar="NAME", help="of datasets that have prompts: to count their tokens"
    )
    add_dataset_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Plans, prints, writes. Returns the exit status.

    Raises:
        ConfigError, ModelError: a setting is wrong, or nothing could meet the objectives.
        AboveRoofline: service times, or what they led to, are faster than the hardware.
    """
    from twinpool.bench.serving.slo import parse_slo
    from twinpool.planner.plan.planning import Planning
    from twinpool.planner.plan.simulated import simulated
    from twinpool.planner.plan.study import Question
    from twinpool.planner.plan.telling import plan_of
    from twinpool.planner.plan.traffic import context_for

    slo = parse_slo(args.slo)
    if slo is None:
        raise ConfigError("--slo is not given; name an objective at least, like --slo ttft=2s --slo itl=50ms")
    require("--price", args.price, args.price is None or args.price >= 0, "0 or more an hour")
    _check_report(args.report)
    dataset = _dataset(args)
    _check_trace(args.trace)
    found = hardware(args, dataset.max_model_len)
    _check_files(args, dataset, found.profile)
    traffic = _traffic(args, replace(dataset, max_model_len=found.max_model_len))
    if dataset.max_model_len is None:
        found = replace(found, max_model_len=min(found.max_model_len, context_for(traffic)))
    progress = _Progress()
    planning = Planning(
        question=Question(
            traffic=traffic,
            slo=slo,
            attainment=args.attainment,
            budget=args.budget,
            confidence=args.confidence,
            replications=args.replications,
            effort=args.effort,
            seed=args.seed,
        ),
        space=_space(args, found),
        simulate=simulated,
        model=found.model.name,
        price_per_hour=args.price,
        say=progress,
        doubts=found.doubts,
        wants_map=args.report is not None,
    )
    planning.run()
    progress.clear()
    plan = plan_of(planning)
    _tell(args, plan)
    if plan.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_DONE if plan.recommended is not None else EXIT_NO_PLAN


def _check_report(file: Path | None) -> None:
    """Raises ConfigError before anything is simulated for a page that cannot be written."""
    if file is None:
        return
    require("--report", str(file), file.suffix == ".html", "a name that ends in .html")
    folder = file.resolve().parent
    can_write = (
        os.access(file if file.exists() else folder, os.W_OK) and folder.is_dir() and not file.is_dir()
    )
    require("--report", str(file), can_write, "a file that can be written, in a folder that exists")


def _check_files(args: argparse.Namespace, dataset: DatasetSettings, profile: str | None) -> None:
    """Raises ConfigError if the page, or its JSON, would be written over what is read."""
    page: Path | None = args.report
    json_of_page = None if page is None else page.with_suffix(".json")
    check_files(
        {"--report": page, "the report's JSON": json_of_page},
        {"--dataset-path" if args.trace is None else "--trace": dataset.path, "--profile": profile},
    )


def _tell(args: argparse.Namespace, plan: Plan) -> None:
    from twinpool.planner.plan.result import encode_plan
    from twinpool.planner.plan.tables import WIDTH, printed

    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    print(encode_plan(plan).decode().rstrip() if args.json else printed(plan, min(WIDTH, columns)))
    if args.report is not None:
        from twinpool.bench.reports.page import write_report
        from twinpool.planner.plan.report import plan_report

        now = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        for file in write_report(args.report, plan_report(plan, now, command_shown(sys.argv[1:]))):
            print(f"report: {file}", file=sys.stderr)


def _dataset(args: argparse.Namespace) -> DatasetSettings:
    from twinpool.bench.serving.datasets import DatasetName

    if args.trace is None:
        return dataset_settings(args)
    kinds = {".jsonl": DatasetName.JSONL_TRACE, ".csv": DatasetName.CSV_TRACE, ".json": DatasetName.RECORDS}
    kind = kinds.get(Path(args.trace).suffix)
    given = vars(args)
    if kind is None:
        raise ConfigError(
            f"--trace is {args.trace!r}; allowed: a .jsonl, .csv or .json file (or --dataset-name and --dataset-path)"
        )
    if given["DatasetSettings.path"] is not None:
        raise ConfigError(f"--trace is {args.trace!r} and --dataset-path is given, too; give one of them")
    given["DatasetSettings.name"], given["DatasetSettings.path"] = kind, args.trace
    return dataset_settings(args)


def _check_trace(file: str | None) -> None:
    """Raises ConfigError, which names the flag, before the data's own readers do."""
    require("--trace", file, file is None or os.access(file, os.R_OK), "a file that is here and can be read")


def _traffic(args: argparse.Namespace, dataset: DatasetSettings) -> Traffic:
    from twinpool.bench.serving.datasets import DatasetName, make_shapes, make_workload
    from twinpool.bench.serving.datasets.settings import FILE_DATASETS
    from twinpool.planner.plan.traffic import traffic_of
    from twinpool.planner.simulator.requests import shapes_of

    is_file = dataset.name in FILE_DATASETS
    num_prompts = args.num_prompts if args.num_prompts is not None else 0 if is_file else _NUM_PROMPTS
    if dataset.name in (DatasetName.SHAREGPT, DatasetName.CUSTOM):
        workload = make_workload(dataset, load_tokenizer(args.tokenizer), num_prompts, args.seed)
        shapes, notes = shapes_of(workload.requests), workload.notes
    else:
        drawn = make_shapes(dataset, num_prompts, args.seed)
        shapes, notes = drawn.shapes, drawn.notes
    for note in notes:
        print(f"dataset: {note}", file=sys.stderr)
    return traffic_of(shapes, args.rate, Path(dataset.path).name if dataset.path else dataset.name.value)


def _space(args: argparse.Namespace, found: Hardware) -> LayoutSpace:
    """Raises ConfigError if the model fits on none of the TP degrees."""
    from twinpool.planner.plan.kinds import kinds_of
    from twinpool.planner.plan.layouts import LayoutSpace

    is_cpu = found.machine is not None
    budgets = args.colocated_budgets or (_CPU_COLOCATED_BUDGETS if is_cpu else _COLOCATED_BUDGETS)
    config: SchedulerConfig = config_from(
        args,
        SchedulerConfig,
        token_budget=_given(args.token_budget, _CPU_PREFILL_BUDGET if is_cpu else _PREFILL_BUDGET),
        max_num_seqs=_given(args.max_num_seqs, _CPU_NUM_SEQS if is_cpu else _NUM_SEQS),
        prefix_cache=not args.no_prefix_cache,
        hybrid=args.hybrid,
    )
    degrees = None if args.tp == "auto" else _counts("--tp", args.tp)
    kinds = kinds_of(degrees, args.budget, partial(_kind, found))
    return LayoutSpace(
        kinds=kinds,
        kv=found.layout,
        max_model_len=found.max_model_len,
        prefill=config,
        decode=config,
        token_budgets=tuple(sorted(_counts("--colocated-budgets", budgets))),
        coordinator=queue(args),
        machine=found.machine,
        can_split=all(kind.moves_kv for kind in kinds.values()),
    )


def _kind(found: Hardware, degree: int) -> WorkerKind:
    """Raises ConfigError if the model does not fit on so many devices."""
    from twinpool.planner.plan.layouts import WorkerKind

    return WorkerKind(found.times(degree), found.capacity(degree), _floor(found, degree))


def _floor(found: Hardware, degree: int) -> Roofline | None:
    """The data sheet's roofline under the times; None where there is no data sheet."""
    from twinpool.planner.times.devices import DEVICES
    from twinpool.planner.times.registry import device_of, precision_of, roofline

    device = device_of(found.spec)
    if device is None or device.name not in DEVICES:
        return None
    precision = precision_of(found.spec, found.conditions)
    return roofline(device.name, found.model, replace(found.conditions, tp=degree, precision=precision))


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _counts(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    ok = all(part.isdecimal() and int(part) >= 1 for part in parts)
    require(flag, text, ok, "whole numbers from 1 on, separated by commas")
    return [int(part) for part in parts]


class _Progress:
    """Tells what was simulated last, and how many simulations that makes."""

    def __init__(self) -> None:
        self._count = 0
        self._line = ProgressLine()

    def __call__(self, text: str) -> None:
        self._count += 1
        self._line.tell(lambda: f"{self._count}: {text}")

    def clear(self) -> None:
        """The line makes room for the result."""
        self._line.clear()
