"""`twinpool simulate`: what clients of a deployment would see, by the cores that serve and a model of the hardware."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.commands.bench_serve import command_shown
from twinpool.commands.bench_serve_flags import add_arrival_flags, add_result_flags, pacing_of
from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings, load_tokenizer
from twinpool.commands.hardware_flags import (
    Hardware,
    add_hardware_flags,
    add_serving_flags,
    hardware,
    queue,
    scheduler,
)
from twinpool.commands.progress import ProgressLine
from twinpool.commands.results import (
    DEFAULT_NUM_PROMPTS,
    EXIT_INTERRUPTED,
    accelerators,
    check_files,
    check_result_flags,
    tell,
)
from twinpool.config import require

if TYPE_CHECKING:
    from twinpool.bench.serving.datasets import DatasetSettings
    from twinpool.bench.serving.datasets.shapes import Shape
    from twinpool.bench.serving.record import Run
    from twinpool.bench.serving.slo import Slo
    from twinpool.planner.deployment import Deployment
    from twinpool.planner.simulator.outcomes import Simulation

_EXAMPLES = """\
examples:
  twinpool simulate --model llama-3.1-8b --gpu h100 --layout 2P3D --dataset-name azure-conversation --request-rate 20
  twinpool simulate --profile profile.json --kv-memory 1GiB --layout 1P1D --num-prompts 200 --request-rate 2
"""


@dataclass(frozen=True, slots=True)
class Files:
    """What is written, if it is wanted: `page` is the report, with its JSON beside it."""

    result: Path | None
    records: Path | None
    page: Path | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="what clients of a deployment would see, without the deployment",
        description="Runs a load through the scheduling that serves, in virtual time: on as many workers as you like, "
        "of hardware that need not be here. Prints what `twinpool bench` prints of a real load.",
        epilog=_EXAMPLES
        + "\nExit status: 0; 1 no request completed; 2 a setting is wrong; 130 Ctrl-C (what was simulated "
        "until then is printed and written).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--layout", default="1P1D", metavar="LAYOUT",
        help="1P1D, 2P3D, 4xcolocated, 2P(TP2)4D(TP4), 4xcolocated(TP2): workers, and devices of each (default 1P1D)",
    )  # fmt: skip
    add_hardware_flags(parser)
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="of datasets that have prompts: to count their tokens"
    )
    add_serving_flags(parser)
    load = parser.add_argument_group("load")
    add_arrival_flags(load)
    load.add_argument("--disable-tqdm", action="store_true", help="no progress")
    add_result_flags(parser)
    parser.add_argument(
        "--slo", action="append", default=[], metavar="METRIC=TIME",
        help="as `twinpool plan` takes it, like --slo ttft=2s --slo itl=50ms: --goodput in other words",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page about the run, too")
    add_dataset_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Simulates, prints, writes. Returns the exit status.

    Raises:
        ConfigError, ModelError: a setting is wrong.
    """
    from twinpool.bench.serving.slo import parse_goodput, parse_slo
    from twinpool.planner.simulator.driver import simulate
    from twinpool.planner.simulator.words import about

    require("--slo", args.slo, not (args.slo and args.goodput), "nothing with --goodput, which says the same")
    slo = parse_slo(args.slo) or parse_goodput(args.goodput)
    check_result_flags(args)
    counted = accelerators(args.accelerators)
    require(
        "--report", str(args.report), args.report is None or args.report.suffix == ".html",
        "a name that ends in .html",
    )  # fmt: skip
    dataset = dataset_settings(args)
    found = hardware(args, dataset.max_model_len)
    deployment = deployment_of(args, found)
    dataset = replace(dataset, max_model_len=deployment.max_model_len)
    files = _files(args, found, deployment, dataset)
    shapes = _shapes(args, dataset)
    progress = None if args.disable_tqdm else _Progress(len(shapes))
    began_at = time.monotonic()
    simulation = simulate(
        deployment,
        shapes,
        num_clients=args.num_clients,
        max_concurrency=args.max_concurrency,
        on_progress=progress,
    )
    if progress is not None:
        progress.clear()
    took_s = time.monotonic() - began_at
    if not simulation.outcomes:
        print("interrupted before a request was sent", file=sys.stderr)
        return EXIT_INTERRUPTED
    simulation = replace(
        simulation,
        accelerators=counted or simulation.accelerators,
        warnings=(*found.doubts, *simulation.warnings),
        settings=_described(args, found, dataset, deployment, len(shapes)),
    )
    seen = simulation.as_run()
    status = tell(
        args,
        seen,
        slo,
        simulation.accelerators,
        file=files.result,
        about={"is_simulated": True, "warnings": list(simulation.warnings)},
        lines=about(simulation, deployment),
    )
    if files.page is not None:
        _report(files.page, args, simulation, seen, slo)
    _say_speed(simulation, took_s)
    return status


def _say_speed(simulation: Simulation, took_s: float) -> None:
    num_requests = len(simulation.outcomes)
    print(
        f"simulated {num_requests} requests in {took_s:.2f} s: {num_requests / max(took_s, 1e-9):,.0f} requests/s, "
        f"{simulation.num_events:,} events",
        file=sys.stderr,
    )


def deployment_of(args: argparse.Namespace, found: Hardware) -> Deployment:
    """The layout of `--layout` on that hardware, with the settings of the flags. Raises ConfigError."""
    from twinpool.planner.deployment import Deployment, Pool
    from twinpool.planner.simulator.layout import parse_layout

    config = scheduler(args)
    parts = parse_layout(args.layout)
    has_two = len(parts) > 1
    require("--layout", args.layout, has_two or not config.hybrid, "two pools with --hybrid, like 2P3D")
    pools = tuple(
        Pool(
            role=part.role,
            num_workers=part.num_workers,
            times=found.times(part.tp),
            num_blocks=found.num_blocks(part.tp),
            scheduler=config,
            num_accelerators=part.tp,
            machine=found.machine,
        )
        for part in parts
    )
    return Deployment(pools, found.layout, found.max_model_len, queue(args))


def _shapes(args: argparse.Namespace, dataset: DatasetSettings) -> list[Shape]:
    """The requests at their times."""
    from twinpool.bench.serving.datasets import DatasetName, make_shapes, make_workload
    from twinpool.planner.simulator.requests import at_times, shapes_of

    num_prompts = DEFAULT_NUM_PROMPTS if args.num_prompts is None else args.num_prompts
    if dataset.name in (DatasetName.SHAREGPT, DatasetName.CUSTOM):
        workload = make_workload(
            dataset, load_tokenizer(args.tokenizer), num_prompts, args.seed, is_bound=args.num_prompts is None
        )
        shapes, notes = shapes_of(workload.requests), workload.notes
    else:
        drawn = make_shapes(dataset, num_prompts, args.seed)
        shapes, notes = drawn.shapes, drawn.notes
    for note in notes:
        print(f"dataset: {note}", file=sys.stderr)
    pacing = pacing_of(args, has_times=all(shape.at_s is not None for shape in shapes))
    return at_times(shapes, pacing, args.seed)


def _report(page: Path, args: argparse.Namespace, simulation: Simulation, seen: Run, slo: Slo | None) -> None:
    import msgspec

    from twinpool.bench.reports.page import write_report
    from twinpool.bench.reports.saved import report_of

    title = f"{args.label or simulation.layout_name}, simulated"
    report = report_of([(title, seen)], title, slo, ", ".join(args.slo or args.goodput), seen.started_at)
    report = msgspec.structs.replace(report, warnings=simulation.warnings)
    for file in write_report(page, report, page.with_suffix(".json")):
        print(f"report: {file}")


def _described(
    args: argparse.Namespace,
    found: Hardware,
    dataset: DatasetSettings,
    deployment: Deployment,
    num_prompts: int,
) -> dict[str, Any]:
    """What a result says of how it came, as JSON values."""
    from twinpool.bench.serving.record import SIMULATION

    flags = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("run", "parser", "hints") and "." not in name
    }
    return flags | {
        "command": command_shown(sys.argv[1:]),
        "backend": SIMULATION,
        "label": args.label or SIMULATION,
        "model": found.model.name,
        "tokenizer": args.tokenizer,
        "layout": deployment.name,
        "times": [pool.times.name for pool in deployment.pools],
        "num_blocks": [pool.num_blocks for pool in deployment.pools],
        "num_prompts": num_prompts,
        "request_rate": math.inf if args.request_rate is None else args.request_rate,
        "dataset_name": dataset.name.value,
        "dataset": asdict(dataset),
    }


def _files(
    args: argparse.Namespace, found: Hardware, deployment: Deployment, dataset: DatasetSettings
) -> Files:
    """Raises ConfigError if one cannot be written, or would be written over what is read or over another."""
    is_saved = args.save_result or args.save_detailed
    files = Files(
        result=_result_path(args, found.model.name, deployment.name) if is_saved else None,
        records=args.save_records,
        page=args.report,
    )
    json_of_page = None if files.page is None else files.page.with_suffix(".json")
    check_files(
        {
            "--save-records": files.records, "--report": files.page, "the report's JSON": json_of_page,
            "--result-filename": files.result,
        },
        {"--dataset-path": dataset.path, "--profile": found.profile},
    )  # fmt: skip
    return files


def _result_path(args: argparse.Namespace, model: str, layout: str) -> Path:
    folder: Path = args.result_dir or Path()
    if args.result_filename is not None:
        return folder / str(args.result_filename)
    rate = math.inf if args.request_rate is None else args.request_rate
    name = "-".join(
        (
            str(args.label or "simulation").replace("/", "-"),
            layout.replace(" ", "-"),
            f"{rate}qps",
            model.split("/")[-1],
        )
    )
    return folder / f"{name}.json"


class _Progress:
    """Tells how many requests have ended."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._began_at = time.monotonic()
        self._line = ProgressLine()

    def __call__(self, num_ended: int, now_s: float) -> None:
        self._line.tell(lambda: self._words(num_ended, now_s))

    def clear(self) -> None:
        """The line makes room for the result."""
        self._line.clear()

    def _words(self, num_ended: int, now_s: float) -> str:
        rate = num_ended / (time.monotonic() - self._began_at)
        return (
            f"{num_ended:,} of {self._num_requests:,} requests, {now_s:,.1f} s of virtual time, {rate:,.0f}/s"
        )
