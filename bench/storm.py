"""Proves that clients which leave cost those that stay nothing.

    python -m twinpool.bench.storm [--seconds 30] [--seed 1]

Four phases on one server: its capacity, with as many clients as keep it busy; steady clients alone, at a share of
that capacity, which gives the SLO; the storm, in which the same steady clients go on while a crowd comes of which 90 %
leave at random moments (before they are answered, with the first token, in decode), the last when the storm ends; and
capacity again, measured from two seconds later on. All together ask for less than the capacity, even if nobody left
early: what the steady clients lose, they lose to the leaving.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twinpool.bench import program, prompts
from twinpool.bench.arrivals import Arrivals, arrival_times
from twinpool.bench.client import Departure, End, Outcome
from twinpool.bench.load import LoadGenerator, Throughput, measure_closed_loop, open_loop
from twinpool.bench.metrics import goodput_per_s, itls_s, slo_of, summary, ttft_s
from twinpool.bench.program import Check, Report, say
from twinpool.bench.server_under_test import POLL_S, ServerFault, ServerUnderTest
from twinpool.bench.serving.slo import Slo

STREAM_LIMIT_S = 60.0
REST_LIMIT_S = 30.0
RECOVERY_S = 2.0
FILL_S = 5.0
LEAVING_SHARE = 0.9
FEWEST = 10
KEPT_SHARE = 0.9
"""What counts as the same level: two runs of the same load differ by less than a tenth."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 1 --decode 1")
    parser.add_argument(
        "--seconds", type=program.positive, default=30.0, metavar="S", help="of the storm (30)"
    )
    parser.add_argument(
        "--measure", type=program.positive, default=15.0, metavar="S", help="of each capacity phase (15)"
    )
    parser.add_argument(
        "--steady", type=program.positive, default=0.4, metavar="F", help="steady load, of capacity (0.4)"
    )
    parser.add_argument(
        "--crowd", type=program.positive, default=0.5, metavar="F", help="the crowd's rate, of capacity (0.5)"
    )
    parser.add_argument(
        "--clients", type=program.count, default=16, metavar="N", help="that keep the server busy (16)"
    )
    parser.add_argument("--words", type=program.count, default=100, metavar="N", help="of a prompt (100)")
    parser.add_argument(
        "--output", type=program.count, default=32, metavar="TOKENS", help="of an answer (32)"
    )
    parser.add_argument(
        "--slo-factor",
        type=program.positive,
        default=3.0,
        metavar="F",
        help="the SLO is so many times what 99%% of the steady requests kept before the storm (3)",
    )
    return program.run(prove, parser.parse_args(argv))


@dataclass(frozen=True, slots=True)
class Crowd:
    """What departures are drawn from: the seconds and the tokens of a whole answer."""

    answer_s: float
    num_tokens: int

    def departure(self, rng: random.Random, longest_s: float) -> Departure | None:
        """When the next client of the crowd leaves, after at most `longest_s`; None: it stays.

        A third of those that leave do so at any moment of an answer's time, a third with the first token, when their KV
        travels, and a third in decode.
        """
        if rng.random() >= LEAVING_SHARE:
            return None
        match rng.randrange(3):
            case 0:
                return Departure(after_s=min(longest_s, rng.uniform(0, self.answer_s)))
            case 1:
                return Departure(longest_s, after_tokens=1)
            case _:
                return Departure(longest_s, after_tokens=rng.randint(2, max(2, self.num_tokens - 1)))


@dataclass(frozen=True, slots=True)
class Aftermath:
    """When the crowd's work was gone, counted from the storm's end (None: not within `REST_LIMIT_S`), and the capacity
    from `RECOVERY_S` after it on."""

    recovered_s: float | None
    probe: Throughput


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """The phases in turn, then the accounts."""
    rng = random.Random(args.seed)
    next_request = partial(prompts.uniform, rng, args.words, args.output)
    say(f"seed {args.seed}: capacity, {args.clients} clients for {args.measure:g} s")
    full, probe = LoadGenerator(server.client, STREAM_LIMIT_S), LoadGenerator(server.client, STREAM_LIMIT_S)
    capacity = await measure_closed_loop(full, args.clients, FILL_S, args.measure, next_request)
    if not capacity.tokens_per_s:
        raise ServerFault(f"no token comes within {args.measure:g} s: {dict(_ends(capacity.outcomes))}")
    rate = capacity.tokens_per_s / args.output
    say(f"{rate:.2f} requests/s; steady clients alone, at {args.steady * rate:.2f} requests/s")
    times = list(arrival_times(Arrivals.POISSON, args.steady * rate, args.seconds, args.seed))
    before = LoadGenerator(server.client, STREAM_LIMIT_S)
    await open_loop(times, lambda: before.one(next_request()))
    slo = slo_of(before.outcomes, args.slo_factor)
    answer_s = summary(o.ended_at - o.sent_at for o in before.outcomes).p50_s
    say(f"SLO: {slo}; the storm")
    violations = (await server.samples()).total("invariant_violations_total")
    steady, crowd = LoadGenerator(server.client, STREAM_LIMIT_S), LoadGenerator(server.client, STREAM_LIMIT_S)
    ends_at = time.monotonic() + args.seconds
    leaving = Crowd(answer_s, args.output)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(open_loop(times, lambda: steady.one(next_request())))
        crowd_times = arrival_times(Arrivals.POISSON, args.crowd * rate, args.seconds, args.seed + 1)
        tasks.create_task(
            open_loop(
                crowd_times,
                lambda: crowd.one(next_request(), leaving.departure(rng, ends_at - time.monotonic())),
            )
        )
        await asyncio.sleep(args.seconds)
        say("capacity again")
        probing = tasks.create_task(
            measure_closed_loop(probe, args.clients, RECOVERY_S, args.measure, next_request)
        )
        aftermath = Aftermath(await _recovery_s(server, (steady, crowd, probe)), await probing)
    rest_s, held = await server.wait_until_rest(REST_LIMIT_S)
    violated = (await server.samples()).total("invariant_violations_total") - violations
    level = [goodput_per_s(load.outcomes, slo, args.seconds) for load in (before, steady)]
    return Report(
        f"abort storm, seed {args.seed}",
        _figures(slo, before, steady, crowd, capacity, aftermath, level),
        (
            _size_check(steady, crowd),
            *_promises(level, capacity, aftermath),
            Check(
                "afterwards all blocks are free or cached and no request lives",
                not held,
                str(held) if held else f"within {rest_s:.1f} s",
            ),
            Check("no invariant was violated", violated == 0, f"{violated:g}"),
        ),
    )


async def _recovery_s(server: ServerUnderTest, loads: Sequence[LoadGenerator]) -> float | None:
    """Seconds until the server works on no more requests than there are clients waiting."""
    started = time.monotonic()
    while (elapsed_s := time.monotonic() - started) < REST_LIMIT_S:
        live = (await server.samples()).total("requests_live")
        if live <= sum(load.num_running for load in loads):
            return elapsed_s
        await asyncio.sleep(POLL_S)
    return None


def _size_check(steady: LoadGenerator, crowd: LoadGenerator) -> Check:
    num_left = _ends(crowd.outcomes)[End.LEFT.value]
    found = f"{num_left} of {len(crowd.outcomes)} left beside {len(steady.outcomes)} steady clients"
    is_enough = len(steady.outcomes) >= FEWEST and num_left >= FEWEST
    return Check(f"there are at least {FEWEST} of both kinds", is_enough, found)


def _promises(level: Sequence[float], capacity: Throughput, aftermath: Aftermath) -> tuple[Check, ...]:
    recovered_s, probe = aftermath.recovered_s, aftermath.probe
    kept = level[1] / level[0] if level[0] else 0.0
    regained = probe.tokens_per_s / capacity.tokens_per_s
    return (
        Check(
            f"the steady clients' goodput keeps its level (at least {KEPT_SHARE:.0%})",
            kept >= KEPT_SHARE,
            f"{level[0]:.2f} → {level[1]:.2f} requests/s, {kept:.0%}",
        ),
        Check(
            f"{RECOVERY_S:g} s after the storm nothing is left of the crowd",
            recovered_s is not None and recovered_s <= RECOVERY_S,
            f"still there after {REST_LIMIT_S:g} s"
            if recovered_s is None
            else f"gone after {recovered_s:.2f} s",
        ),
        Check(
            f"{RECOVERY_S:g} s after the storm full capacity is back (at least {KEPT_SHARE:.0%})",
            regained >= KEPT_SHARE,
            f"{capacity.tokens_per_s:.0f} → {probe.tokens_per_s:.0f} tokens/s, {regained:.0%}",
        ),
    )


def _figures(
    slo: Slo,
    before: LoadGenerator,
    steady: LoadGenerator,
    crowd: LoadGenerator,
    capacity: Throughput,
    aftermath: Aftermath,
    level: Sequence[float],
) -> dict[str, Any]:
    return {
        "capacity, output tokens/s": {"before": capacity.tokens_per_s, "after": aftermath.probe.tokens_per_s},
        "SLO": {"TTFT, s": slo.ttft_s, "ITL p99, s": slo.itl_p99_s},
        "steady clients' goodput, requests/s": {"before": level[0], "in the storm": level[1]},
        "steady before": _steady_figures(before),
        "steady in the storm": _steady_figures(steady),
        "the crowd": dict(_ends(crowd.outcomes)),
        "tokens that leavers had": str(
            Counter(len(o.token_ids) for o in crowd.outcomes if o.end is End.LEFT).most_common(4)
        ),
        "crowd's work gone after, s": aftermath.recovered_s,
    }


def _steady_figures(load: LoadGenerator) -> dict[str, Any]:
    return {
        **_ends(load.outcomes),
        "TTFT": str(summary(map(ttft_s, load.outcomes))),
        "ITL": str(summary(gap for outcome in load.outcomes for gap in itls_s(outcome))),
    }


def _ends(outcomes: Sequence[Outcome]) -> Counter[str]:
    return Counter(outcome.end.value for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
