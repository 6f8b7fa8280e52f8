"""Proves that comparisons do not see differences where there are none.

    python -m twinpool.bench.comparison.same_arm [--comparisons 20] [--repetitions 4]

One server is loaded twice with the same requests, as if it were two arms, a few repetitions for each comparison, and
each first and second in turn. Every difference that is shown is a false one. With the defaults it takes about a quarter
of an hour, in which nothing else should run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import uuid
from collections.abc import Sequence

from twinpool.bench import program, prompts
from twinpool.bench.comparison.measures import comparisons
from twinpool.bench.comparison.outputs import check_outputs
from twinpool.bench.program import Check, Report, say
from twinpool.bench.reports.model import Comparison, Verdict
from twinpool.bench.reports.words import verdict
from twinpool.bench.server_under_test import ServerUnderTest
from twinpool.bench.serving.arrivals import Pacing, Process, schedule
from twinpool.bench.serving.generator import run_load
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.server_facts import ServerFacts, ask_server
from twinpool.bench.serving.settings import LoadSettings
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.workload import PlannedRequest

FIRST, SECOND = "first", "second"
MOST_SHARE = 0.05
"""Of the comparisons that may show a difference."""
_SLO = Slo(ttft_s=1.0, itl_p99_s=0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 1 --decode 1")
    parser.add_argument(
        "--comparisons", type=program.count, default=20, metavar="N", help="of an arm with itself (20)"
    )
    parser.add_argument(
        "--repetitions", type=program.count, default=4, metavar="N", help="of each comparison, 2 or more (4)"
    )
    parser.add_argument("--requests", type=program.count, default=12, metavar="N", help="of one load (12)")
    parser.add_argument("--rate", type=program.positive, default=4.0, metavar="R", help="per second (4)")
    parser.add_argument("--prompt", type=program.count, default=128, metavar="N", help="tokens of each (128)")
    parser.add_argument("--tokens", type=program.count, default=32, metavar="N", help="of each answer (32)")
    args = parser.parse_args(argv)
    if args.repetitions < 2:
        parser.error("--repetitions is 1; allowed: 2 or more, as one has no interval")
    return program.run(prove, args)


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """A load that does not count, then all comparisons."""
    facts = await ask_server(server.url, args.api_key, None)
    rng = random.Random(args.seed)
    await _loaded(_requests(args, rng), server, facts, args.api_key)
    rows: list[tuple[Comparison, ...]] = []
    num_compared = num_different = 0
    for number in range(args.comparisons):
        pairs = [
            await _pair(args, rng, server, facts, is_turned=repetition % 2 == 1)
            for repetition in range(args.repetitions)
        ]
        rows.append(comparisons(FIRST, SECOND, pairs, _SLO))
        outputs = check_outputs(FIRST, SECOND, pairs)
        num_compared += outputs.num_compared
        num_different += outputs.num_different
        shown = _shown(rows[-1])
        say(
            f"comparison {number + 1}: {'; '.join(str(verdict(each)) for each in shown) or 'no difference shown'}"
        )
    num_shown = sum(bool(_shown(each)) for each in rows)
    by_measure = {row.measure.name: 0 for each in rows for row in each}
    for each in rows:
        for row in _shown(each):
            by_measure[row.measure.name] += 1
    allowed = math.floor(MOST_SHARE * args.comparisons)
    return Report(
        f"one arm compared with itself {args.comparisons} times, {args.repetitions} repetitions each",
        {
            "comparisons that showed a difference": num_shown,
            "differences shown, by measure": by_measure,
            "answers compared": num_compared,
        },
        (
            Check(
                f"at most {allowed} of {args.comparisons} comparisons show a difference where there is none",
                num_shown <= allowed,
                str(num_shown),
            ),
            Check(
                "the same request has the same answer twice",
                num_compared > 0 and not num_different,
                f"{num_different} of {num_compared} differ",
            ),
        ),
    )


async def _pair(
    args: argparse.Namespace,
    rng: random.Random,
    server: ServerUnderTest,
    facts: ServerFacts,
    *,
    is_turned: bool,
) -> tuple[Run, Run]:
    """The same requests twice. Turned, what is sent last counts as the first arm's."""
    requests = _requests(args, rng)
    before, after = [await _loaded(requests, server, facts, args.api_key) for _ in range(2)]
    return (after, before) if is_turned else (before, after)


def _requests(args: argparse.Namespace, rng: random.Random) -> list[PlannedRequest]:
    made = [
        PlannedRequest(
            index=index,
            prompt=prompts.exact_ids(rng, args.prompt),
            input_tokens=args.prompt,
            output_tokens=args.tokens,
        )
        for index in range(args.requests)
    ]
    return schedule(made, Pacing(Process.POISSON, args.rate), rng.randrange(2**31))


async def _loaded(
    requests: Sequence[PlannedRequest], server: ServerUnderTest, facts: ServerFacts, api_key: str | None
) -> Run:
    """One load, which finds nothing of another one's in a prefix cache."""
    settings = LoadSettings(
        server.url,
        facts.model,
        kind=facts.kind,
        api_key=api_key,
        extra_body={"cache_salt": uuid.uuid4().hex},
        with_timelines=False,
    )
    return await asyncio.to_thread(run_load, requests, settings)


def _shown(rows: Sequence[Comparison]) -> list[Comparison]:
    return [row for row in rows if row.verdict is not Verdict.NO_DIFFERENCE]


if __name__ == "__main__":
    sys.exit(main())
