"""Proves that no stream is lost, doubled or cut short while workers die.

    python -m twinpool.bench.chaos [--streams 200] [--seconds 180] [--seed 1]

Streams of all kinds run without a pause while workers of every pool are killed, restarted and frozen, for less and
for more than their lease, at random. Every stream must end complete, with exactly the tokens of an undisturbed run
and a usage that counts each once, or with an error that says after how many attempts it was given up. Afterwards
nothing may be held, no invariant may have been violated, and the coordinator's memory must be what it was.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinpool.bench import program, prompts
from twinpool.bench.client import Client, End, Generation, Outcome
from twinpool.bench.faults import FaultKind, schedule
from twinpool.bench.metrics import summary, ttft_s
from twinpool.bench.program import Check, Report, say
from twinpool.bench.server_under_test import Samples, ServerFault, ServerUnderTest

STREAM_LIMIT_S = 240.0
REST_LIMIT_S = 60.0
REFUSED_PAUSE_S = 0.25
MOST_OVERTIME = 3
"""Faults and load go on until enough streams have run, but at most so many times the asked duration."""
MEMORY_SHARE = 0.1
_GIVEN_UP = re.compile(r"lost (\d+) times and is not started again|the server's retry budget")
_MUST_BE_ZERO = ("invariant_violations_total", "duplicate_tokens_total", "protocol_faults_total")


@dataclass(slots=True)
class Tallies:
    """What became of the streams, and of the workers."""

    num_complete: int = 0
    num_resumed: int = 0
    most_attempts: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        """Streams that were taken in and came to an end of any kind."""
        return len(self.outcomes)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 2 --decode 2 --dtype float32")
    parser.add_argument(
        "--streams", type=program.count, default=200, metavar="N", help="at least so many (200)"
    )
    parser.add_argument(
        "--seconds", type=program.positive, default=180.0, metavar="S", help="of faults and load (180)"
    )
    parser.add_argument(
        "--concurrency", type=program.count, default=20, metavar="N", help="streams at any moment (20)"
    )
    parser.add_argument(
        "--distinct", type=program.count, default=32, metavar="N", help="distinct requests (32)"
    )
    parser.add_argument(
        "--gap", type=program.positive, default=5.0, metavar="S", help="mean time between faults (5)"
    )
    parser.add_argument(
        "--lease", type=program.positive, default=5.0, metavar="S", help="the server's lease (5)"
    )
    parser.add_argument(
        "--max-attempts", type=program.count, default=3, metavar="N", help="the server's --max-attempts (3)"
    )
    return program.run(prove, parser.parse_args(argv))


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """References, then chaos, then the accounts."""
    rng = random.Random(args.seed)
    requests = [prompts.varied(rng) for _ in range(args.distinct)]
    say(f"seed {args.seed}: {len(requests)} distinct requests, undisturbed twice")
    wanted = await references(server.client, requests)
    _, held = await server.wait_until_rest(REST_LIMIT_S)
    if held:
        raise ServerFault(f"the undisturbed server does not come to rest: {held}")
    memory_before = server.memory_bytes()["coordinator"]
    before = await server.samples()
    started = time.monotonic()
    tallies = await _chaos(args, server, requests, wanted, rng)
    chaos_s = time.monotonic() - started
    say(f"{chaos_s:.0f} s of chaos are over; {tallies.num_ended} streams ended")
    await server.wait_ready()
    rest_s, held = await server.wait_until_rest(REST_LIMIT_S)
    after = await server.samples()
    say("the same requests again, undisturbed")
    again = await _answers(server.client, requests, STREAM_LIMIT_S)
    decayed = sum(not _same(o, w) for o, w in zip(again, wanted, strict=True))
    await server.wait_until_rest(REST_LIMIT_S)
    memory_after = server.memory_bytes()["coordinator"]
    checks = (
        _streams_check(tallies, args.streams),
        Check("every stream ends complete and token-exact, or with an explicit error after the stated attempts",
              not tallies.wrong, "; ".join(tallies.wrong[:5]) or "all did"),
        Check("afterwards all blocks are free or cached and no request lives", not held,
              str(held) if held else f"within {rest_s:.1f} s"),
        *(Check(f"{name} did not move", moved == 0, f"{moved:g}") for name, moved in _moved(before, after).items()),
        Check("afterwards every request has its undisturbed answer", not decayed, f"{decayed} differ"),
        Check(f"the coordinator's memory is back to its start ± {MEMORY_SHARE:.0%}",
              abs(memory_after / memory_before - 1) <= MEMORY_SHARE,
              f"{memory_before / 1e6:.1f} → {memory_after / 1e6:.1f} MB"),
    )  # fmt: skip
    return Report(
        f"chaos, seed {args.seed}",
        _figures(args, tallies, chaos_s, rest_s, memory_before, memory_after),
        checks,
    )


async def references(client: Client, requests: Sequence[Generation]) -> list[Outcome]:
    """The undisturbed answers, in the order of `requests`; asked for twice, one by one and then together.

    Raises ServerFault if an undisturbed request fails or answers differently the second time.
    """
    alone = [await client.generate(request, STREAM_LIMIT_S) for request in requests]
    together = await _answers(client, requests, STREAM_LIMIT_S)
    for request, first, second in zip(requests, alone, together, strict=True):
        if first.end is not End.COMPLETE or not _same(second, first):
            raise ServerFault(
                f"undisturbed, the request with the prompt {request.prompt[:40]!r} ended {first.end} and {second.end} "
                f"({first.error or second.error or 'with different tokens'}); chaos would prove nothing"
            )
    return alone


async def _answers(client: Client, requests: Sequence[Generation], limit_s: float) -> list[Outcome]:
    return list(await asyncio.gather(*(client.generate(request, limit_s) for request in requests)))


async def _chaos(
    args: argparse.Namespace,
    server: ServerUnderTest,
    requests: Sequence[Generation],
    wanted: Sequence[Outcome],
    rng: random.Random,
) -> Tallies:
    tallies = Tallies()
    started = time.monotonic()

    def goes_on() -> bool:
        elapsed_s = time.monotonic() - started
        limit_s: float = args.seconds * (MOST_OVERTIME if tallies.num_ended < args.streams else 1)
        return elapsed_s < limit_s

    async def client() -> None:
        while goes_on():
            number = rng.randrange(len(requests))
            await _one_stream(server, requests[number], wanted[number], args.max_attempts, tallies)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_hurt(args, server, tallies, goes_on))
        for _ in range(args.concurrency):
            tasks.create_task(client())
    return tallies


async def _one_stream(
    server: ServerUnderTest, request: Generation, wanted: Outcome, max_attempts: int, tallies: Tallies
) -> None:
    outcome = await server.client.generate(request, STREAM_LIMIT_S)
    if outcome.end is End.REFUSED and outcome.status in (429, 503):
        tallies.refused[f"{outcome.status} {outcome.error_code}"] += 1
        await asyncio.sleep(REFUSED_PAUSE_S)
        return
    tallies.outcomes.append(outcome)
    if (fault := wrong_with(outcome, wanted, max_attempts)) is not None:
        tallies.wrong.append(f"{outcome.request_id}: {fault}")
        say(f"WRONG {tallies.wrong[-1]}")
    elif outcome.end is End.COMPLETE:
        tallies.num_complete += 1
    else:
        tallies.given_up[outcome.error] += 1
    attempts = await server.num_attempts(outcome.request_id)
    tallies.most_attempts = max(tallies.most_attempts, attempts)
    tallies.num_resumed += attempts > 1 and outcome.end is End.COMPLETE


def wrong_with(outcome: Outcome, wanted: Outcome, max_attempts: int) -> str | None:
    """What a stream did that it must not, or None."""
    if outcome.end is End.COMPLETE:
        if outcome.token_ids != wanted.token_ids:
            return f"other tokens from number {_first_difference(outcome.token_ids, wanted.token_ids)} on"
        if not _same(outcome, wanted):
            return f"the right tokens, and another text or finish reason ({outcome.finish_reason})"
        if outcome.num_output_tokens != len(outcome.token_ids):
            return f"usage says {outcome.num_output_tokens} tokens, {len(outcome.token_ids)} came"
        return None
    if outcome.end is End.FAILED or (outcome.end is End.REFUSED and outcome.status == 500):
        if outcome.token_ids != wanted.token_ids[: len(outcome.token_ids)]:
            return f"an error after other tokens: {outcome.error}"
        given_up = _GIVEN_UP.search(outcome.error)
        if given_up is None or (given_up[1] is not None and int(given_up[1]) != max_attempts):
            return f"an error that does not say that {max_attempts} attempts were lost: {outcome.error}"
        return None
    return f"it ended {outcome.end} after {len(outcome.token_ids)} tokens: {outcome.status} {outcome.error}"


def _same(outcome: Outcome, wanted: Outcome) -> bool:
    return (outcome.token_ids, outcome.text, outcome.finish_reason) == (
        wanted.token_ids,
        wanted.text,
        wanted.finish_reason,
    )


def _first_difference(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    pairs = zip(tokens, wanted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(wanted)))


async def _hurt(
    args: argparse.Namespace, server: ServerUnderTest, tallies: Tallies, goes_on: Callable[[], bool]
) -> None:
    """Carries the schedule out as long as it `goes_on`; leaves nobody frozen."""
    started = time.monotonic()
    frozen: dict[int, asyncio.TimerHandle] = {}
    loop = asyncio.get_running_loop()
    try:
        for fault in schedule(list(server.workers()), args.gap, args.lease, args.seed):
            await asyncio.sleep(max(0.0, started + fault.at_s - time.monotonic()))
            if not goes_on():
                return
            pid = server.workers().get(fault.worker_id)
            if pid is None or pid in frozen or not _signal(pid, _SIGNAL[fault.kind]):
                tallies.faults["skipped: it was down or frozen"] += 1
                say(f"{fault.at_s:7.1f} s  {fault}: skipped, it is down or frozen")
                continue
            tallies.faults[fault.kind.value] += 1
            say(f"{fault.at_s:7.1f} s  {fault}")
            if fault.frozen_s:
                frozen[pid] = loop.call_later(fault.frozen_s, _thaw, pid, frozen)
    finally:
        for pid, timer in list(frozen.items()):
            timer.cancel()
            _thaw(pid, frozen)


_SIGNAL = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.RESTART: signal.SIGTERM,
    FaultKind.FREEZE: signal.SIGSTOP,
    FaultKind.FREEZE_LONG: signal.SIGSTOP,
}


def _thaw(pid: int, frozen: dict[int, asyncio.TimerHandle]) -> None:
    del frozen[pid]
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _moved(before: Samples, after: Samples) -> dict[str, float]:
    return {name: after.total(name) - before.total(name) for name in _MUST_BE_ZERO}


def _streams_check(tallies: Tallies, wanted: int) -> Check:
    found = f"{tallies.num_ended}, {tallies.num_complete} complete, {tallies.num_resumed} of them resumed"
    return Check(f"at least {wanted} streams ran under faults", tallies.num_ended >= wanted, found)


def _figures(
    args: argparse.Namespace,
    tallies: Tallies,
    chaos_s: float,
    rest_s: float,
    memory_before: int,
    memory_after: int,
) -> dict[str, Any]:
    complete = [outcome for outcome in tallies.outcomes if outcome.end is End.COMPLETE]
    return {
        "seconds of chaos": chaos_s,
        "streams at any moment": args.concurrency,
        "streams": {
            "ended": tallies.num_ended,
            "complete and token-exact": tallies.num_complete,
            "of these resumed": tallies.num_resumed,
            "given up, explicitly": sum(tallies.given_up.values()),
            "wrong": len(tallies.wrong),
            "most attempts of one": tallies.most_attempts,
        },
        "refused at once, and asked again": dict(tallies.refused),
        "errors": dict(tallies.given_up.most_common(8)),
        "faults": dict(tallies.faults),
        "output tokens": sum(len(outcome.token_ids) for outcome in tallies.outcomes),
        "TTFT": str(summary(map(ttft_s, complete))),
        "whole answers": str(summary(o.ended_at - o.sent_at for o in complete)),
        "seconds until all was at rest": rest_s,
        "coordinator's USS, MB": {"before": memory_before / 1e6, "after": memory_after / 1e6},
    }


if __name__ == "__main__":
    sys.exit(main())
