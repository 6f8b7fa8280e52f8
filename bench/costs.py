"""Proves what a server costs beside the model: seconds until ready, CPU of the coordinator, memory of the workers.

    python -m twinpool.bench.costs [--streams 64]

A worker's memory is its share of all pages that are not shared memory (Pss_Anon and Pss_File: its own, and its part of
the libraries that others use too), less its weights and its KV pool. A decode worker's pool lies in shared memory, also
where prefill workers map it; a prefill worker's is the one private memory that core dumps leave out.

The coordinator cannot take less per token than a send takes. That is measured beside it (`send_floor.py`), alone and
while equal streams decode: they leave nothing of a small process in the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.bench import program, prompts
from twinpool.bench.client import End, Generation
from twinpool.bench.limits import add_flag, known_or_measured
from twinpool.bench.load import LoadGenerator
from twinpool.bench.program import Check, Report
from twinpool.bench.send_floor import send_s
from twinpool.bench.server_under_test import ServerFault, ServerUnderTest

MOST_READY_S = 6.0
MOST_TOKEN_S = 60e-6
MOST_MEMORY_BYTES = 400e6
STREAM_LIMIT_S = 120.0
_PROMPT = 32
_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Streaming:
    """Of all streams while they ran side by side: the coordinator's CPU per token, and how many tokens that was, their
    size on the way to the client, the seconds from one token of a stream to its next, and until all streams ran."""

    token_s: float
    num_tokens: int
    event_bytes: int
    gap_s: float
    filling_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = program.parser(__doc__ or "", "--prefill 1 --decode 1")
    parser.add_argument("--streams", type=program.count, default=64, metavar="N", help="at once (64)")
    parser.add_argument("--tokens", type=program.count, default=160, metavar="N", help="of each (160)")
    add_flag(parser)
    return program.run(prove, parser.parse_args(argv))


async def prove(args: argparse.Namespace, server: ServerUnderTest) -> Report:
    """A warm-up that does not count, the streams, then the memory."""
    figures = await known_or_measured(args.limits)
    rng = random.Random(args.seed)
    load = LoadGenerator(server.client, STREAM_LIMIT_S)
    await load.one(prompts.exact(rng, _PROMPT, 8))
    found = await _streaming(args, server, load, rng)
    alone_s = await send_s(args.streams, found.event_bytes, found.gap_s)
    async with asyncio.TaskGroup() as beside:
        for generation in _generations(args, rng):
            beside.create_task(load.one(generation))
        await asyncio.sleep(found.filling_s)
        floor_s = await send_s(args.streams, found.event_bytes, found.gap_s)
    if any(outcome.end is not End.COMPLETE for outcome in load.outcomes):
        raise ServerFault(f"not every stream is whole: {[str(outcome.end) for outcome in load.outcomes]}")
    beyond = {name: own_bytes(pid) - figures.shape.weight_bytes for name, pid in server.workers().items()}
    most = max(beyond.values())
    checks = [
        Check(
            f"the coordinator takes at most {MOST_TOKEN_S * 1e6:g} µs of CPU per token of {args.streams} streams",
            found.token_s <= MOST_TOKEN_S,
            f"{found.token_s * 1e6:.1f}, {floor_s * 1e6:.1f} of which a send takes here",
        ),
        Check(
            f"a worker takes at most {MOST_MEMORY_BYTES / 1e6:g} MB beyond weights and KV pool",
            most <= MOST_MEMORY_BYTES,
            f"{most / 1e6:.0f}",
        ),
    ]
    if server.ready_s is not None:
        ready = f"the server is ready within {MOST_READY_S:g} s"
        checks.append(Check(ready, server.ready_s <= MOST_READY_S, f"{server.ready_s:.1f}"))
    return Report(
        f"costs, {args.streams} streams",
        {
            "ready (s)": server.ready_s,
            "coordinator CPU per token (µs)": found.token_s * 1e6,
            "a send alone (µs)": alone_s * 1e6,
            "a send beside the streams (µs)": floor_s * 1e6,
            "bytes per token": found.event_bytes,
            "tokens counted": found.num_tokens,
            "memory beyond weights and KV pool (MB)": {name: size / 1e6 for name, size in beyond.items()},
            "most of it (MB)": most / 1e6,
            "weights (MB)": figures.shape.weight_bytes / 1e6,
        },
        tuple(checks),
    )


async def _streaming(
    args: argparse.Namespace, server: ServerUnderTest, load: LoadGenerator, rng: random.Random
) -> Streaming:
    """Runs the streams. Raises ServerFault if they hardly ran side by side."""
    asked = _generations(args, rng)
    num_before = len(load.outcomes)
    streams = asyncio.gather(*(load.one(generation) for generation in asked))
    samples: list[tuple[float, float]] = []
    while not streams.done():
        samples.append((time.monotonic(), server.cpu_s()["coordinator"]))
        await asyncio.wait([streams], timeout=_SAMPLE_S)
    outcomes = load.outcomes[num_before:]
    start = max((outcome.first_output_at or 0.0) for outcome in outcomes)
    end = min(outcome.token_at[-1] for outcome in outcomes if outcome.token_at)
    within = [(at, cpu_s) for at, cpu_s in samples if start <= at <= end]
    if len(within) < 2:
        raise ServerFault("the streams hardly ran side by side; ask for more --tokens")
    (first_at, first_s), (last_at, last_s) = within[0], within[-1]
    num_tokens = sum(first_at <= at < last_at for outcome in outcomes for at in outcome.token_at)
    event_bytes = sum(o.num_body_bytes for o in outcomes) // sum(len(o.token_at) for o in outcomes)
    gap_s = (last_at - first_at) * len(outcomes) / num_tokens
    filling_s = start - min(outcome.sent_at for outcome in outcomes)
    return Streaming((last_s - first_s) / num_tokens, num_tokens, event_bytes, gap_s, filling_s)


def _generations(args: argparse.Namespace, rng: random.Random) -> list[Generation]:
    return [prompts.exact(rng, _PROMPT, args.tokens) for _ in range(args.streams)]


def own_bytes(pid: int) -> int:
    """A process's share of pages that are neither shared memory nor of a KV pool. Raises ServerFault if the system does
    not tell."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        mappings = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise ServerFault(f"the memory of process {pid} cannot be read: {exc.strerror}") from exc
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    if not {"Pss_Anon", "Pss_File"} <= fields.keys():
        raise ServerFault(f"{os.uname().sysname} {os.uname().release} does not tell anonymous memory apart")
    in_all = sum(int(fields[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_File"))
    return in_all - _not_dumped(mappings)


def _not_dumped(mappings: str) -> int:
    """Bytes that are there of what core dumps leave out (the flag "dd" of `smaps`)."""
    num_bytes = last = 0
    for line in mappings.splitlines():
        if line.startswith("Pss:"):
            last = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "dd" in line.split():
            num_bytes += last
    return num_bytes


if __name__ == "__main__":
    sys.exit(main())
