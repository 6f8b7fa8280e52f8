"""`twinpool sweep`: the highest rate at which objectives hold, by workload: where splitting wins, where it loses."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinpool.commands.comparing import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    Bed,
    add_bed_flags,
    bed,
    ends_like_ctrl_c,
    require_times,
    say,
    tell,
)
from twinpool.config import require

if TYPE_CHECKING:
    from twinpool.bench.comparison.stand import Stand
    from twinpool.bench.comparison.sweeping import Cell, Searched
    from twinpool.bench.reports.model import Report
    from twinpool.bench.serving.slo import Slo

MIN_INPUT = 8
NOTHING_WRITTEN = "no workload had a run on every arm yet, so there is no report"
UNTUNED_BUDGET = 128
"""Of colocated arms without one: the default of `twinpool serve`."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "sweep",
        help="the highest rate at which objectives hold, by workload: where splitting the pools wins and loses",
        description="For each combination of prompt length, output length and reuse, searches the highest request rate "
        "at which each arm still meets each of four objectives (tight or loose TTFT, tight or loose ITL, as multiples "
        "of what is undisturbed here) for most requests. Nothing else should run meanwhile.",
        epilog="Exit status: 0; 1 a server failed; 2 a setting is wrong; 130 Ctrl-C (cells until then are written).",
    )
    add_bed_flags(parser, "colocated-chunked-128,1p1d", "sweep")
    parser.add_argument("--input", default="128,1024", metavar="LIST", help="prompt lengths (128,1024)")
    parser.add_argument("--output-tokens", default="32,128", metavar="LIST", help="output lengths (32,128)")
    parser.add_argument(
        "--reuse", default="0", metavar="LIST",
        help="shares of all prompt tokens that other prompts have too, from 0 to below 1 (0)",
    )  # fmt: skip
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="one objective of your own instead of the four, as `twinpool bench` takes it",
    )  # fmt: skip
    parser.add_argument(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="of requests that must meet it (0.9)"
    )
    parser.add_argument(
        "--resolution", type=float, default=1.15, metavar="FACTOR", help="when a search ends (1.15)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="of one run's arrivals at least (10)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="for all of it (30)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Searches, prints, writes the report; what was found until something ended it, too.

    Raises:
        ConfigError, ModelError: a setting is wrong.
        ServerFault, NoServer, NothingMeasured: a server does not start or answer.
    """
    from twinpool.bench.comparison.stand import Stand
    from twinpool.bench.serving.slo import parse_goodput

    require_times(args)
    require("--attainment", args.attainment, 0 < args.attainment < 1, "between 0 and 1")
    require("--resolution", args.resolution, 1 < args.resolution < 10, "above 1")
    own = parse_goodput(args.goodput)
    same = bed(args)
    cells = _cells(args, same.model.max_model_len)
    found: list[list[Searched]] = []
    with ends_like_ctrl_c(), Stand(same.hardware, same.folder, args.api_key) as stand:
        try:
            _search(args, cells, own, stand, same, found)
        except KeyboardInterrupt:
            is_told = any(all(searched.probes for searched in cell) for cell in found)
            say(f"interrupted: {'what was searched until then follows' if is_told else NOTHING_WRITTEN}")
            return EXIT_INTERRUPTED
        finally:
            tried = [cell for cell in found if all(searched.probes for searched in cell)]
            if tried:
                tell(same, "sweep", _report(tried, stand, same, args.minutes))
    return EXIT_DONE


def _search(
    args: argparse.Namespace,
    cells: Sequence[Cell],
    own: Slo | None,
    stand: Stand,
    same: Bed,
    found: list[list[Searched]],
) -> None:
    """Searches cell by cell; what is tried is added to `found`, and is there even if this raises."""
    from twinpool.bench.comparison.rate_search import Search
    from twinpool.bench.comparison.sweeping import Objective, Searched, corners, start_rate, sweep_cell
    from twinpool.bench.comparison.yardstick import measure_yardstick, yardstick_arm

    arms = [arm.with_token_budget(UNTUNED_BUDGET) if arm.is_tuned else arm for arm in same.arms]
    ends_at = time.monotonic() + 60 * args.minutes
    stand.find(arms)
    by = yardstick_arm(arms)
    yardstick = measure_yardstick(
        lambda requests, slot: stand.load(by, requests, slot).run,
        same.model.tokenizer,
        args.seed,
        same.model.max_model_len,
    )
    say(f"undisturbed: {yardstick}")
    for number, cell in enumerate(cells):
        objectives = corners(cell, yardstick) if own is None else [Objective("yours", own)]
        search = Search(start_rate(cell, yardstick), target=args.attainment, resolution=args.resolution)
        say(f"{cell.name}; good are requests within {'; '.join(f'{o.short}: {o.slo}' for o in objectives)}")
        found.append([Searched(arm, cell, objectives, search) for arm in arms])
        now = time.monotonic()
        sweep_cell(
            found[-1],
            stand,
            same.model.tokenizer,
            seconds=args.seconds,
            seed=args.seed,
            until=now + (ends_at - now) / (len(cells) - number),
            say=say,
        )


def _report(found: Sequence[Sequence[Searched]], stand: Stand, same: Bed, minutes: float) -> Report:
    """Of cells with at least one run on every arm."""
    from twinpool.bench.comparison.noise import noise_table, noise_warnings
    from twinpool.bench.comparison.results import description, now
    from twinpool.bench.comparison.sweeping import curve, doubts, findings, win_lose_map
    from twinpool.bench.reports.model import ArmReport, Fact, Report

    arms = [searched.arm for searched in found[0]]
    search = found[0][0].search
    probes = [probe for cell in found for searched in cell for probe in searched.probes]
    noises = {
        arm.name: [noise for cell in found for noise in cell[number].noises]
        for number, arm in enumerate(arms)
    }
    own = {arm.name: noises[arm.name] for arm in arms if not arm.url}
    maps = [win_lose_map([(cell[0], cell[number]) for cell in found]) for number in range(1, len(arms))]
    return Report(
        title=f"sweep: {arms[0].name} against {', '.join(arm.name for arm in arms[1:])}",
        created_at=now(),
        arms=tuple(
            ArmReport(name=arm.name, description=description(arm, stand), command=stand.command(arm))
            for arm in arms
        ),
        curves=tuple(
            curve(searched, objective)
            for cell in found
            for searched in cell
            for objective in searched.objectives
        ),
        maps=tuple(maps),
        tables=(noise_table(noises),),
        num_other_runs=len(probes),
        num_other_requests=sum(probe.num_requests for probe in probes),
        warnings=(*doubts(found, minutes), *noise_warnings(own)),
        findings=tuple(text for known in maps for text in findings(known)),
        hardware=same.facts,
        settings=(
            *same.settings,
            Fact("a rate holds if", f"{search.target:.0%} of the requests meet the objective"),
            Fact("a search ends", f"when the highest rate is known within a factor of {search.resolution:g}"),
            Fact(
                "lowest rate",
                f"what holds at no rate was tried down to {search.span:g} times below the first",
            ),
        ),
        commands=(same.command,),
        confidence=search.confidence,
    )


def _cells(args: argparse.Namespace, max_model_len: int) -> list[Cell]:
    from twinpool.bench.comparison.sweeping import Cell

    inputs, outputs = _whole("--input", args.input), _whole("--output-tokens", args.output_tokens)
    reuses = [_number("--reuse", text) for text in args.reuse.split(",")]
    require("--input", args.input, min(inputs) >= MIN_INPUT, f"{MIN_INPUT} tokens or more")
    require("--output-tokens", args.output_tokens, min(outputs) >= 2, "2 tokens or more")
    require("--reuse", args.reuse, all(0 <= reuse < 1 for reuse in reuses), "from 0 to below 1")
    longest = max(inputs) + max(outputs)
    require(
        "--input", args.input, longest <= max_model_len, f"with the output at most {max_model_len} tokens"
    )
    return [Cell(*each) for each in itertools.product(inputs, outputs, reuses)]


def _whole(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    require(flag, text, all(part.isdigit() for part in parts), "whole numbers separated by commas")
    return [int(part) for part in parts]


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        require(flag, text, False, "numbers separated by commas")
        raise
