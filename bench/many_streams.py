"""Proves that many streams at once cost each token little: what the coordinator adds to it.

    python -m twinpool.bench.many_streams [--streams 500] [--seconds 20]

The coordinator and its HTTP endpoint are real, a process of their own (`coordinator_alone.py`). This process is the
worker, which computes nothing (`scripted_worker.py`), and all the clients. A token's time runs from just before its
message is given to the worker's socket until its bytes are read at the client. So encoding the message, its encryption,
two sockets and what keeps this process from reading at once are in it: the coordinator adds less than is told.

Two phases. Now and then: each stream gets a token about every `--gap` seconds, at random, and what came due is said
every `--step` milliseconds, as by the steps of a worker. All together: one message with a token of each stream, as from
a step with so large a batch, where the last token waits until all before it have been written.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from twinpool.bench import program
from twinpool.bench.client import Client
from twinpool.bench.http1 import Address, connect
from twinpool.bench.program import Check, Report, say
from twinpool.bench.scripted_worker import MAX_MODEL_LEN, ScriptedWorker
from twinpool.bench.server_under_test import ServerFault
from twinpool.bench.serving.answer import StreamedAnswer
from twinpool.bench.serving.distributions import Distribution, distribution
from twinpool.bench.serving.record import Ending
from twinpool.join_token import VARIABLE, JoinToken

MOST_ADDED_S = 1e-3
START_LIMIT_S = 60.0
STREAM_LIMIT_S = 600.0
AT_ONCE = 20
"""So many streams begin at a time."""
SETTLING_S = 2.0
"""Tokens of this time do not count: the streams have just begun."""
TOGETHER_ROUNDS = 20
TOGETHER_PAUSE_S = 0.5
_PROMPT = (1, 2, 3, 4)


class Stream(StreamedAnswer):
    """One stream's answer, whose every token has the same text. `is_over` is done at its end."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def over(self) -> None:
        """Nothing more will come."""
        if not self.is_over.done():
            self.is_over.set_result(None)

    def token_times(self) -> list[float]:
        """When each token was read; those that came in one piece at the same time."""
        unit = len(self.texts[0]) if self.texts else 1
        return [at for at, text in zip(self.times, self.texts, strict=True) for _ in range(len(text) // unit)]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run: its times on the monotonic clock, and the coordinator's CPU in it, in seconds."""

    begins_at: float
    ends_at: float
    cpu_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=program.count, default=500, metavar="N", help="at once (500)")
    parser.add_argument(
        "--seconds", type=program.positive, default=20.0, metavar="S", help="of tokens now and then (20)"
    )
    parser.add_argument(
        "--gap", type=program.positive, default=2.0, metavar="S", help="between a stream's tokens, mean (2)"
    )
    parser.add_argument(
        "--step", type=program.positive, default=20.0, metavar="MS", help="between the worker's messages (20)"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="whose tokenizer the coordinator uses (the built-in)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the tokens' times (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as JSON too")
    args = parser.parse_args(argv)
    return program.status_of(_prove(args), args)


async def _prove(args: argparse.Namespace) -> Report:
    rng = random.Random(args.seed)
    async with _coordinator(args.model) as (url, endpoint, process, token):
        worker = ScriptedWorker(endpoint, token, args.streams)
        await _until_ready(Client(url))
        say(f"{args.streams} streams begin")
        address = Address.parse("--url", url)
        streams: list[asyncio.Task[Stream]] = []
        try:
            while (num_begun := len(streams)) < args.streams:
                numbers = range(num_begun, min(num_begun + AT_ONCE, args.streams))
                streams += [asyncio.create_task(_follow(address, f"stream-{i}")) for i in numbers]
                await worker.until_streams(len(streams), START_LIMIT_S)
            say(f"each gets a token about every {args.gap:g} s, for {args.seconds:g} s")
            await _now_and_then(worker, rng, SETTLING_S, args)
            sparse = await _phase(process, _now_and_then(worker, rng, args.seconds, args))
            say(f"all get one together, {TOGETHER_ROUNDS} times")
            together = await _phase(process, _all_together(worker))
            worker.end()
            followed = await asyncio.gather(*streams)
        except TimeoutError:
            reasons = Counter(": ".join(task.result().ending()) for task in streams if task.done())
            raise ServerFault(
                f"{len(worker.streams)} of {args.streams} streams began within {START_LIMIT_S:g} s; {dict(reasons)}"
            ) from None
        finally:
            for task in streams:
                task.cancel()
            if streams:
                await asyncio.wait(streams)
            worker.close()
    if worker.failures:
        raise ServerFault(f"the coordinator said what no worker understands: {worker.failures[0]}")
    return _report(args, worker, followed, sparse, together)


@asynccontextmanager
async def _coordinator(model: str | None) -> AsyncIterator[tuple[str, str, psutil.Process, JoinToken]]:
    """Its URL, where workers connect, its process, its join token."""
    token = JoinToken.fresh()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twinpool.bench.coordinator_alone", *([model] if model else []),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {VARIABLE: token.text},
    )  # fmt: skip
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        async with asyncio.timeout(START_LIMIT_S):
            line = (await process.stdout.readline()).decode().split()
        if len(line) != 2:
            raise ServerFault("the coordinator did not start; its last words are above")
        yield f"http://127.0.0.1:{line[0]}", line[1], psutil.Process(process.pid), token
        process.stdin.close()
        async with asyncio.timeout(START_LIMIT_S):
            await process.wait()
    except TimeoutError:
        raise ServerFault(f"the coordinator did not start, or end, within {START_LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _follow(address: Address, request_id: str) -> Stream:
    """Asks for a stream, as plain as clients do, and follows it to its end."""
    body = {"prompt": _PROMPT, "max_tokens": MAX_MODEL_LEN - len(_PROMPT), "stream": True}
    headers = ("Content-Type: application/json", f"X-Request-Id: {request_id}", "Connection: close")
    stream = Stream(request_id)
    connection = await connect(address)
    try:
        async with asyncio.timeout(STREAM_LIMIT_S):
            connection.ask(
                address.request("POST", "/v1/completions", headers, msgspec.json.encode(body)), stream
            )
            await stream.is_over
    finally:
        connection.abort()
    return stream


async def _until_ready(client: Client) -> None:
    """Returns once the worker has joined. Raises ServerFault."""
    deadline = time.monotonic() + START_LIMIT_S
    while (await client.get("/ready")).status != 200:
        if time.monotonic() > deadline:
            raise ServerFault(f"the worker did not join within {START_LIMIT_S:g} s")
        await asyncio.sleep(0.02)


async def _phase(process: psutil.Process, doing: Awaitable[None]) -> Phase:
    """Runs a phase, and lets its last tokens arrive."""
    before, begins_at = process.cpu_times(), time.monotonic()
    await doing
    ends_at = time.monotonic()
    await asyncio.sleep(TOGETHER_PAUSE_S)
    after = process.cpu_times()
    return Phase(begins_at, ends_at, after.user + after.system - before.user - before.system)


async def _now_and_then(
    worker: ScriptedWorker, rng: random.Random, seconds: float, args: argparse.Namespace
) -> None:
    """Tokens at random times, by an exponential distribution; one message per step with those that are due."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    due = [(start + rng.expovariate(1 / args.gap), key) for key in worker.streams]
    heapq.heapify(due)
    step_at = start
    while (step_at := step_at + args.step / 1e3) < start + seconds:
        await asyncio.sleep(max(0.0, step_at - loop.time()))
        keys = []
        while due[0][0] <= step_at:
            _, key = due[0]
            keys.append(key)
            # A sequence has one token per step at most.
            heapq.heapreplace(due, (step_at + args.step / 2e3 + rng.expovariate(1 / args.gap), key))
        if keys:
            worker.say(keys)


async def _all_together(worker: ScriptedWorker) -> None:
    for _ in range(TOGETHER_ROUNDS):
        await asyncio.sleep(TOGETHER_PAUSE_S)
        worker.say(list(worker.streams))


def _report(
    args: argparse.Namespace,
    worker: ScriptedWorker,
    streams: Sequence[Stream],
    sparse: Phase,
    together: Phase,
) -> Report:
    # The last token stops the answer: it is counted, and is no text.
    whole = [
        stream
        for stream in streams
        if stream.ending()[0] is Ending.COMPLETED
        and len(stream.token_times()) == len(worker.said[stream.request_id]) - 1
    ]
    added = distribution(_added_s(worker, whole, sparse))
    crowd = distribution(_added_s(worker, whole, together))
    if added is None or crowd is None:
        raise ServerFault("no token came; ask for more --seconds")
    beside = [
        said.num_beside + 1
        for tokens in worker.said.values()
        for said in tokens
        if sparse.begins_at <= said.at < sparse.ends_at
    ]
    checks = (
        Check(
            f"the coordinator adds less than {MOST_ADDED_S * 1e3:g} ms to the median token of {args.streams} streams",
            added.p50 < MOST_ADDED_S,
            f"{added.p50 * 1e3:.3f} ms",
        ),
        Check(
            "every stream got each of its tokens once",
            len(whole) == len(streams),
            f"{len(whole)} of {len(streams)}",
        ),
    )
    figures = {
        "tokens now and then": {
            "tokens": added.count,
            "tokens per second": added.count / (sparse.ends_at - sparse.begins_at),
            "tokens in the message of a token (mean)": sum(beside) / len(beside),
            **_milliseconds(added),
            "coordinator, busy (share of one core)": sparse.cpu_s / (sparse.ends_at - sparse.begins_at),
            "coordinator, CPU per token (µs)": sparse.cpu_s / added.count * 1e6,
        },
        "all streams' tokens in one message": {
            "tokens": crowd.count,
            **_milliseconds(crowd),
            "coordinator, CPU per token (µs)": together.cpu_s / crowd.count * 1e6,
        },
    }
    return Report(f"{args.streams} streams, seed {args.seed}", figures, checks)


def _added_s(worker: ScriptedWorker, streams: Sequence[Stream], phase: Phase) -> list[float]:
    """From a token's message to its bytes at the client, of the tokens that were said in the phase."""
    return [
        read_at - said.at
        for stream in streams
        for said, read_at in zip(worker.said[stream.request_id], stream.token_times(), strict=False)
        if phase.begins_at <= said.at < phase.ends_at
    ]


def _milliseconds(values: Distribution) -> dict[str, float]:
    return {
        f"{name} (ms)": getattr(values, field) * 1e3
        for name, field in (("median", "p50"), ("p90", "p90"), ("p99", "p99"), ("most", "max"))
    }


if __name__ == "__main__":
    sys.exit(main())
