"""`twinpool compare`: one load on several layouts of the same hardware, interleaved, and what can be said of it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from twinpool.commands.comparing import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_RESULT,
    Bed,
    add_bed_flags,
    bed,
    say,
    tell,
)
from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings
from twinpool.config import require

if TYPE_CHECKING:
    import tokenizers

    from twinpool.bench.comparison.arms import Arm
    from twinpool.bench.comparison.comparing import MakeLoad
    from twinpool.bench.reports.model import Report, Table
    from twinpool.bench.serving.slo import Slo

DATASET, THREE_CUSTOMERS = "dataset", "three-customers"
STORY_BUDGET = 128


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
    add_bed_flags(parser, "colocated-chunked,1p1d", "compare")
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
    add_dataset_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compares, prints, writes the reports.

    Raises:
        ConfigError, ModelError: a setting is wrong.
        ServerFault, NoServer, NothingMeasured: a server does not start or answer.
    """
    from twinpool.bench.comparison.comparing import Wanted, compare_arms, report
    from twinpool.bench.comparison.scenarios import serve_customers, table, three_customers
    from twinpool.bench.comparison.stand import Interrupted, Stand

    require("--minutes", args.minutes, 0 < args.minutes < math.inf, "above 0")
    require("--seconds", args.seconds, 0 < args.seconds < math.inf, "above 0")
    require("--repetitions", args.repetitions, args.repetitions >= 1, "1 or more")
    require("--confidence", args.confidence, 0.5 < args.confidence < 1, "between 0.5 and 1")
    names = [name.strip() for name in args.workload.split(",") if name.strip()]
    same = bed(args)
    makers = _loads(names, args, same)
    wanted = Wanted(
        tuple(same.arms), tuple(makers), args.minutes, args.seed, args.confidence, args.repetitions
    )
    reports: list[Report] = []
    was_interrupted = False
    with Stand(same.hardware, same.folder, args.api_key) as stand:
        try:
            if THREE_CUSTOMERS in names:
                customers = three_customers(same.max_model_len)
                found = serve_customers(_untuned(same.arms), customers, stand, same.tokenizer, args.seed)
                reports.append(_story(table(found), same))
            if makers:
                compared = compare_arms(wanted, stand, same.tokenizer, say)
                was_interrupted = any(each.trials.was_interrupted for each in compared)
                reports += [report(each, stand, wanted, same.command, same.facts) for each in compared]
        except Interrupted:
            was_interrupted = True
    for each in reports:
        tell(same.folder, each)
    if was_interrupted:
        say("interrupted: what was compared until then is above, if anything")
        return EXIT_INTERRUPTED
    return EXIT_NO_RESULT if any(arm.not_a_result for each in reports for arm in each.arms) else EXIT_DONE


def _loads(names: Sequence[str], args: argparse.Namespace, same: Bed) -> list[MakeLoad]:
    """What makes each workload, but the story. Raises ConfigError."""
    from twinpool.bench.comparison.workloads import LOADS
    from twinpool.bench.serving.slo import parse_goodput

    slo = parse_goodput(args.goodput)
    allowed = (*LOADS, DATASET, THREE_CUSTOMERS)
    makers = []
    for name in names:
        require("--workload", name, name in allowed, ", ".join(allowed))
        if name == DATASET:
            makers.append(_with_slo(_dataset_load(args, same.tokenizer), slo))
        elif name in LOADS:
            made = partial(LOADS[name], same.tokenizer, seconds=args.seconds)
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


def _story(told: Table, same: Bed) -> Report:
    from twinpool.bench.reports.model import Report

    return Report(
        title=THREE_CUSTOMERS,
        created_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        arms=(),
        tables=(told,),
        hardware=same.facts,
        commands=(same.command,),
    )
