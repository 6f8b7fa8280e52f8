"""Proves that a server with twice its load serves those it lets in as promised, and tells the others at once.

    python -m twinpool.bench.overload [--seconds 40] [--seed 1]

Three phases: capacity, with as many clients as keep the server busy; a light load, which shows the undisturbed TTFT;
then Poisson arrivals at twice the capacity. Who is let in must keep the SLO: TTFT within the server's longest wait plus
a multiple of the undisturbed one, ITL p99 within a multiple of the one at capacity. All others must get a 429 with
Retry-After within 50 ms, and nobody may hang. A tenth of the refused ask once more when Retry-After says so: how many
of these get in is reported beside how many newcomers do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from twinpool.bench import program, prompts
from twinpool.bench.arrivals import Arrivals, arrival_times
from twinpool.bench.client import End, Outcome
from twinpool.bench.load import LoadGenerator, Throughput, measure_closed_loop, open_loop
from twinpool.bench.metrics import goodput_per_s, is_good, itls_s, summary, ttft_s
from twinpool.bench.program import Check, Report, say
from twinpool.bench.server_under_test import ServerFault, ServerUnderTest
from twinpool.bench.serving.distributions import percentile
from twinpool.bench.serving.slo import Slo

STREAM_LIMIT_S = 60.0
REST_LIMIT_S = 30.0
REFUSAL_LIMIT_S = 0.05
FILL_S = 5.0
"""A load has settled by then; what comes before is not measured."""
LIGHT_SHARE = 0.2
KEPT_SHARE = 0.99
RETRYING_SHARE = 0.1
"""Of those refused, so many come back when told: more would add to the load that is measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 1 --decode 1 --max-wait 2")
    parser.add_argument(
        "--seconds", type=program.positive, default=40.0, metavar="S", help="of overload (40)"
    )
    parser.add_argument(
        "--measure", type=program.positive, default=20.0, metavar="S", help="of the other phases (20)"
    )
    parser.add_argument(
        "--times", type=program.positive, default=2.0, metavar="F", help="load over capacity (2)"
    )
    parser.add_argument(
        "--clients", type=program.count, default=32, metavar="N", help="that keep the server busy (32)"
    )
    parser.add_argument(
        "--max-wait", type=program.positive, default=2.0, metavar="S", help="the server's --max-wait (2)"
    )
    parser.add_argument(
        "--slo-factor", type=program.positive, default=3.0, metavar="F", help="the SLO's multiples (3)"
    )
    parser.add_argument("--words", type=program.count, default=100, metavar="N", help="of a prompt (100)")
    parser.add_argument(
        "--output", type=program.count, default=32, metavar="TOKENS", help="of an answer (32)"
    )
    return program.run(prove, parser.parse_args(argv))


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """The phases in turn, then the accounts."""
    rng = random.Random(args.seed)
    next_request = partial(prompts.uniform, rng, args.words, args.output)
    say(f"seed {args.seed}: capacity, {args.clients} clients for {args.measure:g} s")
    busy = LoadGenerator(server.client, STREAM_LIMIT_S)
    capacity = await measure_closed_loop(busy, args.clients, FILL_S, args.measure, next_request)
    if not capacity.tokens_per_s:
        raise ServerFault(f"no token comes within {args.measure:g} s")
    rate = capacity.tokens_per_s / args.output
    say(f"{rate:.2f} requests/s; undisturbed, at {LIGHT_SHARE * rate:.2f} requests/s")
    light = LoadGenerator(server.client, STREAM_LIMIT_S)
    times = arrival_times(Arrivals.CONSTANT, LIGHT_SHARE * rate, args.measure, args.seed)
    await open_loop(times, lambda: light.one(next_request()))
    slo = Slo(
        ttft_s=args.max_wait + args.slo_factor * summary(map(ttft_s, light.outcomes)).p99_s,
        itl_p99_s=args.slo_factor
        * percentile([percentile(itls_s(o), 99) for o in _complete(capacity.outcomes)], 99),
    )
    say(f"SLO: {slo}")
    say(f"now {args.times * rate:.2f} requests/s")
    fresh, retried = (LoadGenerator(server.client, STREAM_LIMIT_S) for _ in range(2))

    async def ask() -> None:
        request, retries = next_request(), rng.random() < RETRYING_SHARE
        outcome = await fresh.one(request)
        if retries and outcome.end is End.REFUSED and outcome.retry_after_s is not None:
            await asyncio.sleep(outcome.retry_after_s)
            await retried.one(request)

    times = arrival_times(Arrivals.POISSON, args.times * rate, args.seconds, args.seed)
    await open_loop(times, ask)
    rest_s, held = await server.wait_until_rest(REST_LIMIT_S)
    return Report(
        f"overload at {args.times:g} × capacity, seed {args.seed}",
        _figures(args, rate, slo, capacity, light, fresh, retried),
        (
            *promises(fresh.outcomes + retried.outcomes, slo),
            Check(
                "afterwards all blocks are free or cached and no request lives",
                not held,
                str(held) if held else f"within {rest_s:.1f} s",
            ),
        ),
    )


def promises(outcomes: Sequence[Outcome], slo: Slo) -> tuple[Check, ...]:
    """What must hold of all requests of an overload."""
    refused = [o for o in outcomes if o.end is End.REFUSED]
    admitted = [o for o in outcomes if o.end is not End.REFUSED]
    kept = sum(is_good(outcome, slo) for outcome in admitted)
    wrong_status = Counter(o.status for o in refused if o.status != 429 or o.retry_after_s is None)
    late = [o for o in refused if _seconds(o) >= REFUSAL_LIMIT_S]
    lost = Counter(o.end.value for o in admitted if o.end is not End.COMPLETE)
    return (
        Check(
            "there is more load than is served", bool(refused), f"{len(refused)} of {len(outcomes)} refused"
        ),
        Check(
            f"who is let in keeps the SLO (at least {KEPT_SHARE:.0%})",
            bool(admitted) and kept >= KEPT_SHARE * len(admitted),
            f"{kept} of {len(admitted)}",
        ),
        Check(
            "who is let in gets a complete answer; nobody hangs", not lost, str(dict(lost)) if lost else "all"
        ),
        Check(
            "the others get 429 with Retry-After",
            not wrong_status,
            str(dict(wrong_status)) if wrong_status else f"all {len(refused)}",
        ),
        Check(
            f"each in under {REFUSAL_LIMIT_S * 1e3:.0f} ms",
            not late,
            f"{len(late)} took longer; {summary(map(_seconds, refused))}",
        ),
    )


def _figures(
    args: argparse.Namespace,
    rate: float,
    slo: Slo,
    capacity: Throughput,
    light: LoadGenerator,
    fresh: LoadGenerator,
    retried: LoadGenerator,
) -> dict[str, Any]:
    admitted = _complete(fresh.outcomes)
    late = [o for o in fresh.outcomes if o.end is End.REFUSED]
    return {
        "capacity": {"requests/s": rate, "output tokens/s": capacity.tokens_per_s},
        "at capacity": _latencies(_complete(capacity.outcomes)),
        "undisturbed": _latencies(_complete(light.outcomes)),
        "SLO": {"TTFT, s": slo.ttft_s, "ITL p99, s": slo.itl_p99_s},
        "overload": {
            "offered, requests/s": args.times * rate,
            "goodput, requests/s": goodput_per_s(fresh.outcomes, slo, args.seconds),
            "ends": str(dict(Counter(o.end.value for o in fresh.outcomes))),
        },
        "who was let in": _latencies(admitted),
        "refused": {
            "after": str(summary(map(_seconds, late))),
            "Retry-After, s": str(
                dict(sorted(Counter(o.retry_after_s for o in late if o.retry_after_s).items()))
            ),
            "why": str(dict(Counter(o.error_code for o in late))),
        },
        "let in": {
            "of newcomers": _share(fresh.outcomes),
            "of those that came back when told": _share(retried.outcomes),
            "came back": len(retried.outcomes),
        },
    }


def _complete(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.end is End.COMPLETE]


def _latencies(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {
        "TTFT": str(summary(map(ttft_s, outcomes))),
        "ITL": str(summary(gap for outcome in outcomes for gap in itls_s(outcome))),
    }


def _seconds(outcome: Outcome) -> float:
    return outcome.ended_at - outcome.sent_at


def _share(outcomes: Sequence[Outcome]) -> float | None:
    """The share that was not refused; None of none."""
    return sum(o.end is not End.REFUSED for o in outcomes) / len(outcomes) if outcomes else None


if __name__ == "__main__":
    sys.exit(main())
