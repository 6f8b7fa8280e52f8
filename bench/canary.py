"""Proves that answers do not decay: the same prompts have the same tokens through a long soak.

    python -m twinpool.bench.canary [--minutes 20] [--seed 1]

Clients ask for all kinds of answers, greedy and sampled, and a fifth of them leave early. Every 50 requests a set of
canary prompts (short, of several blocks, longer than a chunk, with a cached prefix, sampled, of one token) must have
exactly the tokens that it had on the fresh server. The memory of every process is sampled; afterwards nothing may be
held.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinpool.bench import program, prompts
from twinpool.bench.client import Client, Departure, End, Generation, Outcome
from twinpool.bench.load import LoadGenerator
from twinpool.bench.metrics import itls_s, slope_per_hour, summary, ttft_s
from twinpool.bench.program import Check, Report, say
from twinpool.bench.server_under_test import ServerFault, ServerUnderTest

STREAM_LIMIT_S = 120.0
REST_LIMIT_S = 30.0
LEAVING_SHARE = 0.2
LONGEST_STAY_S = 2.0
SETTLED_SHARE = 0.25
"""So much of the soak fills pools and caches; memory must not grow afterwards."""
GROWTH_SHARE = 0.1
_MUST_BE_ZERO = ("invariant_violations_total", "duplicate_tokens_total", "protocol_faults_total")


@dataclass(slots=True)
class Soak:
    """What is kept while it runs. `memory` has (seconds, bytes) of each process."""

    wanted: Mapping[str, Outcome]
    num_rounds: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 1 --decode 1 --dtype float32 --num-blocks 512")
    parser.add_argument("--minutes", type=program.positive, default=20.0, metavar="M", help="of soak (20)")
    parser.add_argument(
        "--clients", type=program.count, default=4, metavar="N", help="that ask at any moment (4)"
    )
    parser.add_argument(
        "--every", type=program.count, default=50, metavar="N", help="requests between canaries (50)"
    )
    parser.add_argument(
        "--sample", type=program.positive, default=30.0, metavar="S", help="between memory readings (30)"
    )
    return program.run(prove, parser.parse_args(argv))


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """The canaries on the fresh server, the soak, then the accounts."""
    canaries = prompts.canaries()
    first = await _ask_all(server.client, canaries)
    if broken := {name: f"{o.end}: {o.error}" for name, o in first.items() if o.end is not End.COMPLETE}:
        raise ServerFault(f"on the fresh server canaries fail: {broken}")
    say(f"seed {args.seed}: {len(canaries)} canaries, {args.clients} clients for {args.minutes:g} minutes")
    before = await server.samples()
    soak, load = Soak(first), LoadGenerator(server.client, STREAM_LIMIT_S)
    await _soak(args, server, soak, load, canaries)
    rest_s, held = await server.wait_until_rest(REST_LIMIT_S)
    after = await server.samples()
    ends = Counter(outcome.end.value for outcome in load.outcomes)
    failed = {end: n for end, n in ends.items() if end not in (End.COMPLETE, End.LEFT)}
    growth = {name: _growth(samples) for name, samples in soak.memory.items()}
    grown = {name: f"{share:+.1%}" for name, share in growth.items() if share > GROWTH_SHARE}
    moved = {name: after.total(name) - before.total(name) for name in _MUST_BE_ZERO}
    return Report(
        f"canary, {args.minutes:g} minutes, seed {args.seed}",
        _figures(soak, load, ends, rest_s),
        (
            Check(
                "canaries always have the same tokens",
                soak.num_rounds > 0 and not soak.wrong,
                "; ".join(soak.wrong[:5]) or f"{soak.num_rounds} rounds of {len(canaries)}",
            ),
            Check(
                "every client that stays gets a complete answer", not failed, str(failed) if failed else "all"
            ),
            Check(
                f"no process grows by more than {GROWTH_SHARE:.0%} once it has settled",
                not grown,
                str(grown) if grown else ", ".join(f"{name} {share:+.1%}" for name, share in growth.items()),
            ),
            Check(
                "afterwards all blocks are free or cached and no request lives",
                not held,
                str(held) if held else f"within {rest_s:.1f} s",
            ),
            *(Check(f"{name} did not move", by == 0, f"{by:g}") for name, by in moved.items()),
        ),
    )


async def _soak(
    args: argparse.Namespace,
    server: ServerUnderTest,
    soak: Soak,
    load: LoadGenerator,
    canaries: Mapping[str, Generation],
) -> None:
    rng = random.Random(args.seed)
    started = time.monotonic()
    until = started + 60 * args.minutes

    async def client() -> None:
        while time.monotonic() < until:
            await load.one(prompts.varied(rng), _departure(rng))
            if len(load.outcomes) % args.every == 0:
                await _canary_round(server.client, canaries, soak, len(load.outcomes))

    async with asyncio.TaskGroup() as tasks:
        watcher = tasks.create_task(_watch_memory(server, soak, args.sample, started))
        clients = [tasks.create_task(client()) for _ in range(args.clients)]
        await asyncio.wait(clients)
        watcher.cancel()
    await _canary_round(server.client, canaries, soak, len(load.outcomes))


def _departure(rng: random.Random) -> Departure | None:
    return Departure(after_s=rng.uniform(0, LONGEST_STAY_S)) if rng.random() < LEAVING_SHARE else None


async def _canary_round(
    client: Client, canaries: Mapping[str, Generation], soak: Soak, num_requests: int
) -> None:
    soak.num_rounds += 1
    for name, outcome in (await _ask_all(client, canaries)).items():
        wanted = soak.wanted[name]
        if (outcome.end, outcome.token_ids) != (End.COMPLETE, wanted.token_ids):
            soak.wrong.append(
                f"{name!r} after {num_requests} requests: {outcome.end} {outcome.error} {outcome.token_ids} instead of "
                f"{wanted.token_ids}"
            )
            say(f"WRONG {soak.wrong[-1]}")
    say(f"{num_requests} requests, round {soak.num_rounds}: {len(soak.wrong)} wrong so far")


async def _ask_all(client: Client, canaries: Mapping[str, Generation]) -> dict[str, Outcome]:
    asked = (client.generate(generation, STREAM_LIMIT_S) for generation in canaries.values())
    return dict(zip(canaries, await asyncio.gather(*asked), strict=True))


async def _watch_memory(server: ServerUnderTest, soak: Soak, every_s: float, started: float) -> None:
    while True:
        for name, num_bytes in server.memory_bytes().items():
            soak.memory.setdefault(name, []).append((time.monotonic() - started, float(num_bytes)))
        await asyncio.sleep(every_s)


def _growth(samples: Sequence[tuple[float, float]]) -> float:
    """How much larger a process is at the end than when it had settled, as a share."""
    settled = samples[round(SETTLED_SHARE * (len(samples) - 1))][1]
    return samples[-1][1] / settled - 1


def _figures(soak: Soak, load: LoadGenerator, ends: Mapping[str, int], rest_s: float) -> dict[str, Any]:
    complete = [outcome for outcome in load.outcomes if outcome.end is End.COMPLETE]
    memory = {}
    for name, samples in soak.memory.items():
        slope = slope_per_hour(samples[round(SETTLED_SHARE * (len(samples) - 1)) :])
        start, end = samples[0][1], samples[-1][1]
        memory[name] = f"{start / 1e6:.1f} → {end / 1e6:.1f} MB, {slope / 1e6:+.1f} MB per hour"
    return {
        "requests": dict(ends),
        "output tokens": sum(len(outcome.token_ids) for outcome in load.outcomes),
        "canary rounds": soak.num_rounds,
        "TTFT": str(summary(map(ttft_s, complete))),
        "ITL": str(summary(gap for outcome in complete for gap in itls_s(outcome))),
        "USS, start → end, slope once settled": memory,
        "seconds until all was at rest": rest_s,
    }


if __name__ == "__main__":
    sys.exit(main())
