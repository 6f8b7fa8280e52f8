"""Proves isolation: long prompts do not disturb the streams that run, nor those streams the prompts.

    python -m twinpool.bench.isolation [--streams 8] [--prompt 2048] [--every 2]

First long prompts one at a time, with nothing beside them; then streams without prompts; then equal streams while a
long prompt arrives again and again. Where the machine takes longer for a prompt than the time between two, the prompts
come as often as it can take them, and the report says so: their queue is not what is measured here.

The gaps of a stream grow with its context, without anybody's doing. So each gap is also compared with the median of the
undisturbed gaps at the same place of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from twinpool.bench import program, prompts
from twinpool.bench.client import End, Outcome
from twinpool.bench.load import LoadGenerator
from twinpool.bench.metrics import summary, ttft_s
from twinpool.bench.program import Check, Report, say
from twinpool.bench.server_under_test import BUSY, ServerFault, ServerUnderTest, busy_shares
from twinpool.bench.serving.distributions import percentile

MOST_ITL, MOST_TTFT = 1.25, 1.15
"""Times the undisturbed figure."""
STREAM_LIMIT_S = 120.0
ALONE = 2
PROMPT_OUTPUT = 8
STREAM_PROMPT = 128
LEAST_ROOM = 1.25
"""Prompts come at least so many times the time that one takes apart."""
SETTLING_TOKENS = 160
"""Of each stream so many do not count: all streams must run, and a context that doubles makes gaps longer by itself."""
PLACES_TOKENS = 16
"""Gaps behind so many consecutive tokens of an answer count as at the same place."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of a stream: behind how many tokens of its answer, and how long."""

    num_before: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 1 --decode 1")
    parser.add_argument("--streams", type=program.count, default=8, metavar="N", help="that decode (8)")
    parser.add_argument("--tokens", type=program.count, default=480, metavar="N", help="of each stream (480)")
    parser.add_argument(
        "--prompt", type=program.count, default=2048, metavar="N", help="tokens of a long one (2048)"
    )
    parser.add_argument(
        "--every", type=program.positive, default=2.0, metavar="S", help="seconds between prompts (2)"
    )
    return program.run(prove, parser.parse_args(argv))


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """A warm-up that does not count, the prompts alone, the streams alone, and both."""
    rng = random.Random(args.seed)
    load = LoadGenerator(server.client, STREAM_LIMIT_S)
    await load.one(prompts.exact(rng, STREAM_PROMPT, PROMPT_OUTPUT))
    alone = [await load.one(prompts.exact(rng, args.prompt, PROMPT_OUTPUT)) for _ in range(ALONE)]
    alone_s = statistics.median(_ttfts_s(alone))
    every_s = max(args.every, LEAST_ROOM * alone_s)
    if every_s > args.every:
        say(
            f"a prompt of {args.prompt} tokens alone takes {alone_s:.2f} s here: one every {every_s:.2f} s instead"
        )
    quiet = _steady_gaps(await _streams(args, load, rng))
    quiet_s = [gap.seconds for gap in quiet]
    quiet_p50_s = percentile(quiet_s, 50)
    say(f"{args.streams} streams alone: {summary(quiet_s)}")
    if not quiet_p50_s:
        raise ServerFault("most tokens came together with another: this machine is too busy to measure gaps")
    before, started = server.cpu_s(), time.monotonic()
    streams = asyncio.create_task(_streams(args, load, rng))
    arrived = await _prompts_until(streams, args, load, rng, every_s)
    took_s, used = time.monotonic() - started, server.cpu_s()
    busy = _steady_gaps(await streams)
    busy_s = [gap.seconds for gap in busy]
    say(f"the same, {len(arrived)} prompts beside them: {summary(busy_s)}")
    itl_times = percentile(busy_s, 99) / quiet_p50_s
    ttft_times = statistics.median(_ttfts_s(arrived)) / alone_s
    return Report(
        f"isolation, {args.streams} streams, a prompt of {args.prompt} tokens every {every_s:.2f} s",
        {
            "ITL without prompts": str(summary(quiet_s)),
            "ITL with prompts": str(summary(busy_s)),
            "TTFT of prompts alone (s)": _ttfts_s(alone),
            "TTFT of prompts beside streams (s)": _ttfts_s(arrived),
            "seconds between prompts, asked for": args.every,
            "seconds between prompts": every_s,
            "p99 ITL, times p50 without prompts": itl_times,
            "p99 ITL without prompts, times its p50": percentile(quiet_s, 99) / quiet_p50_s,
            "the same two, at equal contexts": [
                percentile(times_at_equal_contexts(gaps, quiet), 99) for gaps in (busy, quiet)
            ],
            "TTFT, times prefill alone": ttft_times,
            BUSY: busy_shares(before, used, took_s),
        },
        (
            Check(
                f"with prompts the p99 ITL is at most {MOST_ITL:g} times the p50 without",
                itl_times <= MOST_ITL,
                f"{itl_times:.2f}",
            ),
            Check(
                f"the prompts' TTFT is at most {MOST_TTFT:g} times that of prefill alone",
                ttft_times <= MOST_TTFT,
                f"{ttft_times:.2f}",
            ),
        ),
    )


async def _streams(args: argparse.Namespace, load: LoadGenerator, rng: random.Random) -> list[Outcome]:
    """Starts the streams at once and follows them to their ends."""
    asked = [prompts.exact(rng, STREAM_PROMPT, args.tokens) for _ in range(args.streams)]
    return list(await asyncio.gather(*(load.one(generation) for generation in asked)))


async def _prompts_until(
    streams: asyncio.Task[list[Outcome]],
    args: argparse.Namespace,
    load: LoadGenerator,
    rng: random.Random,
    every_s: float,
) -> list[Outcome]:
    """A prompt every so often until the streams end; returns the outcomes of all."""
    asked: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as tasks:
        while not streams.done():
            await asyncio.wait([streams], timeout=every_s)
            if not streams.done():
                prompt = prompts.exact(rng, args.prompt, PROMPT_OUTPUT)
                asked.append(tasks.create_task(load.one(prompt)))
    if not asked:
        raise ServerFault(
            f"the streams ended within {every_s:.2f} s, before a prompt came; ask for more --tokens"
        )
    return [task.result() for task in asked]


def _ttfts_s(outcomes: Sequence[Outcome]) -> list[float]:
    """Raises ServerFault if a request was not answered."""
    seconds = [ttft_s(outcome) for outcome in outcomes if outcome.end is End.COMPLETE]
    known = [value for value in seconds if value is not None]
    if len(known) < len(outcomes):
        raise ServerFault(f"of {len(outcomes)} prompts {len(outcomes) - len(known)} got no whole answer")
    return known


def _steady_gaps(outcomes: Sequence[Outcome]) -> list[Gap]:
    """The gaps of all streams while all of them are settled. Raises ServerFault if a stream is not whole."""
    if any(
        outcome.end is not End.COMPLETE or len(outcome.token_at) <= SETTLING_TOKENS for outcome in outcomes
    ):
        raise ServerFault(f"not every stream is whole: {[str(outcome.end) for outcome in outcomes]}")
    start = max(outcome.token_at[SETTLING_TOKENS] for outcome in outcomes)
    end = min(outcome.token_at[-1] for outcome in outcomes)
    return [
        Gap(num_before, later - earlier)
        for outcome in outcomes
        for num_before, (earlier, later) in enumerate(pairwise(outcome.token_at), start=1)
        if start <= earlier and later <= end
    ]


def times_at_equal_contexts(gaps: Sequence[Gap], quiet: Sequence[Gap]) -> list[float]:
    """Each of `gaps` over the median of the `quiet` ones at its place, where there are some. Not where that is 0:
    those tokens came in pairs."""
    at_place: defaultdict[int, list[float]] = defaultdict(list)
    for gap in quiet:
        at_place[gap.num_before // PLACES_TOKENS].append(gap.seconds)
    medians = {place: statistics.median(seconds) for place, seconds in at_place.items()}
    places = ((gap.num_before // PLACES_TOKENS, gap.seconds) for gap in gaps)
    return [seconds / medians[place] for place, seconds in places if medians.get(place)]


if __name__ == "__main__":
    sys.exit(main())
