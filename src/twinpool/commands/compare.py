"""`twinpool compare`: one load on several layouts of the same hardware, interleaved, and what can be said of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from twinpool.commands.comparing import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_RESULT,
    Bed,
    add_bed_flags,
    bed,
    ends_like_ctrl_c,
    require_times,
    say,
    tell,
)
from twinpool.commands.dataset_flags import add_dataset_flags, dataset_settings
from twinpool.config import require

if TYPE_CHECKING:
    from twinpool.bench.comparison.arms import Arm
    from twinpool.bench.comparison.comparing import ComparedLoad, MakeLoad, Wanted
    from twinpool.bench.comparison.stand import Stand
    from twinpool.bench.comparison.workloads import Model
    from twinpool.bench.reports.model import Report
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
        help="of interference, chat, three-customers; or `dataset`, what the dataset flags say "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=5.0, metavar="M",
        help="for all of it, one repetition at least; three-customers takes its own time (default 5)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=6.0, metavar="S", help="that one load should last (default 6)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=12, metavar="N", help="most of each load (default 12)"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="of all intervals together (default 0.95)"
    )
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="the objective, as `twinpool bench` takes it "
        "(default: multiples of what is undisturbed here)",
    )  # fmt: skip
    parser.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="of --workload dataset, per second (default: the data's times)",
    )
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="of it (1: Poisson)")
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="of it (default: as many as come in --seconds)"
    )
    add_dataset_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compares, prints, writes the reports; what was found until something ended it, too.

    Raises:
        ConfigError, ModelError: a setting is wrong.
        ServerFault, NoServer, NothingMeasured: a server does not start or answer.
    """
    from twinpool.bench.comparison.comparing import Wanted
    from twinpool.bench.comparison.stand import Stand

    require_times(args)
    require("--repetitions", args.repetitions, args.repetitions >= 1, "1 or more")
    require("--confidence", args.confidence, 0.5 <= args.confidence < 1, "from 0.5 to below 1")
    names = [name.strip() for name in args.workload.split(",") if name.strip()]
    same = bed(args)
    wanted = Wanted(
        arms=tuple(same.arms),
        loads=tuple(_loads(names, args, same.model)),
        minutes=args.minutes,
        seed=args.seed,
        confidence=args.confidence,
        most_repetitions=args.repetitions,
    )
    reports: list[Report] = []
    with ends_like_ctrl_c(), Stand(same.hardware, same.folder, args.api_key) as stand:
        try:
            if THREE_CUSTOMERS in names:
                reports.append(_told_story(stand, same, args.seed))
            if wanted.loads:
                _compare(wanted, stand, same, reports)
        except KeyboardInterrupt:
            is_told = "whole repetitions until then are told above" if reports else "nothing was compared yet"
            say(
                f"interrupted: {is_told}{'' if reports else '; there is no report, only logs in ' + str(same.folder)}"
            )
            return EXIT_INTERRUPTED
    return EXIT_NO_RESULT if any(arm.not_a_result for each in reports for arm in each.arms) else EXIT_DONE


def _compare(wanted: Wanted, stand: Stand, same: Bed, reports: list[Report]) -> None:
    """Compares, and tells what was found even if that raises."""
    from twinpool.bench.comparison.comparing import compare_arms
    from twinpool.bench.comparison.results import Circumstances, comparison_report

    around = Circumstances(same.command, same.facts, same.settings, wanted.seed, wanted.confidence)
    found: list[ComparedLoad] = []
    try:
        compare_arms(wanted, stand, same.model, say, found)
    finally:
        for each in found:
            if each.trials.num_repetitions:
                reports.append(comparison_report(each, stand, around))
                tell(same, each.trials.load.name, reports[-1])


def _told_story(stand: Stand, same: Bed, seed: int) -> Report:
    """Serves the three customers on each arm, and tells of those on which it came to an end even if another raises."""
    from twinpool.bench.comparison.results import description, now
    from twinpool.bench.comparison.scenarios import (
        NUM_ROUNDS,
        Story,
        arm_report,
        conclusions,
        table,
        tell_story,
        three_customers,
    )
    from twinpool.bench.reports.model import Report

    customers = three_customers(same.model.max_model_len)
    stories: list[Story] = []
    stand.find(same.arms)
    try:
        for arm in _untuned(same.arms):
            say(f"{THREE_CUSTOMERS}: {arm.name}, each alone and all together, {NUM_ROUNDS} times")
            stories.append(tell_story(arm, customers, stand, same.model.tokenizer, seed, say))
    finally:
        told = Report(
            title=f"{THREE_CUSTOMERS}: {', '.join(story.arm.name for story in stories)}",
            created_at=now(),
            arms=tuple(
                arm_report(story, description(story.arm, stand), stand.command(story.arm))
                for story in stories
            ),
            tables=tuple(table(story) for story in stories),
            findings=tuple(text for story in stories for text in conclusions(story)),
            hardware=same.facts,
            settings=same.settings,
            commands=(same.command,),
        )
        if stories:
            tell(same, THREE_CUSTOMERS, told)
    return told


def _loads(names: Sequence[str], args: argparse.Namespace, model: Model) -> list[MakeLoad]:
    """What makes each workload, but the story. Raises ConfigError."""
    from twinpool.bench.comparison.workloads import LOADS
    from twinpool.bench.serving.slo import parse_goodput

    slo = parse_goodput(args.goodput)
    allowed = (*LOADS, DATASET, THREE_CUSTOMERS)
    require("--workload", args.workload, bool(names), ", ".join(allowed))
    makers = []
    for name in names:
        require("--workload", name, name in allowed, ", ".join(allowed))
        if name == DATASET:
            makers.append(_with_slo(_dataset_load(args, model), slo))
        elif name in LOADS:
            makers.append(_with_slo(partial(LOADS[name], model, seconds=args.seconds), slo))
    return makers


def _with_slo(make: MakeLoad, slo: Slo | None) -> MakeLoad:
    """The same load with the objective that the user has given, if any."""
    return make if slo is None else lambda yardstick: replace(make(yardstick), slo=slo)


def _dataset_load(args: argparse.Namespace, model: Model) -> MakeLoad:
    """What the dataset flags describe, tried out at once: what is wrong with it is told before servers start."""
    from twinpool.bench.comparison.workloads import from_dataset
    from twinpool.bench.comparison.yardstick import Yardstick
    from twinpool.bench.serving.arrivals import Pacing, Process

    settings = dataset_settings(args, max_model_len=model.max_model_len)
    rate, count = args.request_rate, args.num_prompts
    require("--num-prompts", count, count is None or count >= 0, "1 or more; 0: all of a file")
    if rate is None:
        pacing = Pacing(Process.REPLAY)
        require(
            "--num-prompts",
            count,
            count is not None,
            "a number, with the data's own times (no --request-rate)",
        )
    else:
        pacing = Pacing(Process.POISSON if args.burstiness == 1 else Process.GAMMA, rate, args.burstiness)
        count = max(4, round(rate * args.seconds)) if count is None else count
    make = partial(from_dataset, model, settings=settings, pacing=pacing, count=count)
    make(Yardstick(1.0, 1.0)).requests(args.seed)
    return make


def _untuned(arms: Sequence[Arm]) -> list[Arm]:
    """For a story of three requests nothing is tuned: the serving default."""
    return [arm.with_token_budget(STORY_BUDGET) if arm.is_tuned else arm for arm in arms]
