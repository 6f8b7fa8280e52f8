"""Load on a server.

Closed loop: so many clients, each asks again when it has its answer. Open loop: requests at set times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from twinpool.bench.client import Client, Departure, End, Generation, Outcome

NextRequest = Callable[[], Generation]


@dataclass(slots=True)
class LoadGenerator:
    """Sends the requests of one load; knows the outcomes of those that ended, how many run. `limit_s` bounds each."""

    client: Client
    limit_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    num_running: int = 0

    async def one(self, generation: Generation, departure: Departure | None = None) -> Outcome:
        """Runs one request to its end and keeps its outcome."""
        self.num_running += 1
        try:
            outcome = await self.client.generate(generation, self.limit_s, departure)
        finally:
            self.num_running -= 1
        self.outcomes.append(outcome)
        return outcome

    async def closed_loop(self, num_clients: int, seconds: float, next_request: NextRequest) -> None:
        """So many clients ask again and again; after `seconds` nobody asks any more, and all wait for their answers."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_clients):
                tasks.create_task(self._ask_until(until, next_request))

    async def _ask_until(self, until: float, next_request: NextRequest) -> None:
        while time.monotonic() < until:
            outcome = await self.one(next_request())
            if outcome.end in (End.REFUSED, End.UNREACHABLE):
                await asyncio.sleep(min(outcome.retry_after_s or 0.2, max(0.0, until - time.monotonic())))


async def open_loop(times: Iterable[float], ask: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Calls `ask` at each offset from now, whatever the server does, and waits for all to end.

    A client that falls behind its own schedule asks late, never less often.
    """
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for offset in times:
            await asyncio.sleep(max(0.0, started + offset - time.monotonic()))
            tasks.create_task(ask())


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens that arrived in a span of time, and the outcomes that ended in it."""

    tokens_per_s: float
    outcomes: tuple[Outcome, ...]


def throughput(outcomes: Iterable[Outcome], start: float, end: float) -> Throughput:
    """What arrived and ended in [start, end) of the client's clock."""
    outcomes = list(outcomes)
    ended = tuple(o for o in outcomes if start <= o.ended_at < end)
    num_tokens = sum(start <= at < end for o in outcomes for at in o.token_at)
    return Throughput(num_tokens / (end - start), ended)


async def measure_closed_loop(
    load: LoadGenerator, num_clients: int, fill_s: float, seconds: float, next_request: NextRequest
) -> Throughput:
    """The throughput that so many clients get in `seconds`, after `fill_s` in which they fill the server."""
    starts_at = time.monotonic() + fill_s
    await load.closed_loop(num_clients, fill_s + seconds, next_request)
    return throughput(load.outcomes, starts_at, starts_at + seconds)
