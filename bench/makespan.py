"""Proves that both cores work: equal requests, all at once, beside the least that their arithmetic and bytes take.

    python -m twinpool.bench.makespan [--requests 32] [--prompt 256] [--output 64]

The floor is that of all cores together, measured in the same run: all FLOPs over the rate of matrix products, or all
bytes (weights once per step of the whole batch, the cache once per token) over the bandwidth of memory, whichever is
more. No schedule can be faster; a split server needs more, because its pools wait for each other at both ends.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence

from twinpool.bench import program, prompts
from twinpool.bench.client import End, Outcome
from twinpool.bench.engine import floors
from twinpool.bench.limits import add_flag, known_or_measured
from twinpool.bench.load import LoadGenerator
from twinpool.bench.metrics import summary, tpot_s, ttft_s
from twinpool.bench.program import Check, Report, say
from twinpool.bench.server_under_test import BUSY, ServerFault, ServerUnderTest, busy_shares

MOST_TIMES = 2.0
"""How many times the floor may be taken."""
STREAM_LIMIT_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 1 --decode 1")
    for flag, value, unit in (
        ("requests", 32, "at once"),
        ("prompt", 256, "tokens"),
        ("output", 64, "tokens"),
    ):
        parser.add_argument(
            f"--{flag}", type=program.count, default=value, metavar="N", help=f"{unit} ({value})"
        )
    parser.add_argument("--rounds", type=program.count, default=2, metavar="N", help="times (2)")
    add_flag(parser)
    return program.run(prove, parser.parse_args(argv))


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """The limits, a warm-up that does not count, then the rounds."""
    figures = await known_or_measured(args.limits)
    num_cores = figures.num_cores
    work = floors.requests(figures.shape, args.requests, args.prompt, args.output)
    floor_s = figures.together(num_cores).floor_s(work)
    rng = random.Random(args.seed)
    await _round(args, server, rng, min(2, args.requests))
    spans, busy, outcomes = [], [], []
    for _ in range(args.rounds):
        before = server.cpu_s()
        span_s, ended = await _round(args, server, rng, args.requests)
        spans.append(span_s)
        busy.append(busy_shares(before, server.cpu_s(), span_s))
        outcomes += ended
        say(
            f"{args.requests} requests: {span_s:.2f} s, {span_s / floor_s:.2f} times the floor of {floor_s:.2f} s"
        )
    times = statistics.median(spans) / floor_s
    num_tokens = args.requests * args.output
    return Report(
        f"makespan, {args.requests} × ({args.prompt} in, {args.output} out)",
        {
            "makespan (s)": spans,
            "floor (s)": floor_s,
            "times the floor": times,
            "output tokens per second": num_tokens / statistics.median(spans),
            "cores": num_cores,
            "FLOPs": work.flops,
            "bytes": work.num_bytes,
            "TTFT": str(summary(map(ttft_s, outcomes))),
            "TPOT": str(summary(map(tpot_s, outcomes))),
            BUSY: {name: statistics.median(shares[name] for shares in busy) for name in busy[0]},
        },
        (
            Check(
                f"the makespan is at most {MOST_TIMES:g} times the floor of all {num_cores} cores",
                times <= MOST_TIMES,
                f"{times:.2f}",
            ),
        ),
    )


async def _round(
    args: argparse.Namespace, server: ServerUnderTest, rng: random.Random, num_requests: int
) -> tuple[float, list[Outcome]]:
    """Seconds from the first request's start to the last token. Raises ServerFault if one has not all its tokens."""
    load = LoadGenerator(server.client, STREAM_LIMIT_S)
    asked = [prompts.exact(rng, args.prompt, args.output) for _ in range(num_requests)]
    started = time.monotonic()
    outcomes = await asyncio.gather(*(load.one(generation) for generation in asked))
    for outcome in outcomes:
        if outcome.end is not End.COMPLETE or len(outcome.token_ids) != args.output:
            raise ServerFault(
                f"a request ended as {outcome.end} with {len(outcome.token_ids)} tokens: {outcome.error}"
            )
    return max(outcome.token_at[-1] for outcome in outcomes) - started, list(outcomes)


if __name__ == "__main__":
    sys.exit(main())
