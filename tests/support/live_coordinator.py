"""A live coordinator, and workers that speak to it over its own sockets and do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from support.coordinator_core import EOS, register, stats
from support.http_gateway import must_not_fail
from support.join_token import TEST_TOKEN
from twinpool.channel import DealerChannel
from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.server import Coordinator
from twinpool.coordinator.service import Output, Submission
from twinpool.messages import (
    Cancel,
    Dropped,
    Granted,
    HandoffReport,
    Heartbeat,
    Left,
    LinkReady,
    Message,
    Peers,
    Prefill,
    PrefillReport,
    PushTo,
    Reserve,
    StepTokens,
    Stop,
    Token,
)
from twinpool.request import Job, RequestKey, SamplingParams

DEADLINE_S = 10.0

M = TypeVar("M", bound=Message)


class WireWorker:
    """A worker that heartbeats and writes down what it is sent; with `serves`, it also answers at once.

    Its output token at index i is 100 + i.
    """

    def __init__(
        self,
        endpoint: str,
        worker_id: str,
        role: Role,
        incarnation: str = "1",
        *,
        serves: bool = False,
        **changes: Any,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.incarnation = incarnation
        self.serves = serves
        self.received: list[Message] = []
        self.jobs: dict[RequestKey, Job] = {}
        self._arrived = asyncio.Event()
        self._channel = DealerChannel(
            endpoint, f"{worker_id}/{incarnation}", TEST_TOKEN, self._on_message, self._on_junk
        )
        self._channel.send(register(worker_id, role, incarnation, **changes))
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.say(Heartbeat(stats(steps_total=3.0)))
            await asyncio.sleep(0.1)

    def _on_junk(self, _: str, error: Exception) -> None:
        raise AssertionError(error)

    def _on_message(self, _: str, message: Message) -> None:
        self.received.append(message)
        self._arrived.set()
        if isinstance(message, Stop):
            self.say(Left("stopped"))
        elif self.serves:
            self._serve(message)

    def _serve(self, message: Message) -> None:
        match message:
            case Peers(peers=peers) if self.role is Role.PREFILL:
                for peer in peers:
                    self.say(LinkReady(peer.worker_id, peer.incarnation, "loopback", 5.0, 1 << 20))
            case Prefill(job=job):
                self.jobs[job.key] = job
            case PushTo(key=key):
                self.say(PrefillReport(key, 0.0, 0.001, 0, 3, 1))
                self.say(StepTokens((self.token(self.jobs[key], 0),)))
            case Reserve(job=job):
                self.jobs[job.key] = job
                self.say(Granted(job.key, 1, (0,), 0, 0.0))
                self.say(HandoffReport(job.key, "loopback", 1 << 20, 0.001, 0.0, 1, 0))
                for index in range(1, job.sampling.max_tokens):
                    self.say(StepTokens((self.token(job, index),)))
            case Cancel(key=key):
                self.say(Dropped(key, "cancelled"))

    @staticmethod
    def token(job: Job, index: int) -> Token:
        return Token(job.key, index, 100 + index, job.finish_reason(index, 100 + index))

    def say(self, message: Message) -> None:
        self._channel.send(message)

    async def got(self, kind: type[M]) -> M:
        """The first message of this kind, waited for."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for message in self.received:
                    if isinstance(message, kind):
                        return message
                self._arrived.clear()
                await self._arrived.wait()

    def fall_silent(self) -> None:
        """The process hangs: its connection stays, nothing comes."""
        self._beating.cancel()

    def die(self) -> None:
        """The process is gone."""
        self._beating.cancel()
        self._channel.close()


class Live:
    """A running coordinator and the workers that a test connects to it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.workers: list[WireWorker] = []

    def worker(self, worker_id: str, role: Role, **values: Any) -> WireWorker:
        """Connects a worker."""
        self.workers.append(WireWorker(self.coordinator.endpoint, worker_id, role, **values))
        return self.workers[-1]


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[Live, Coordinator]]:
    coordinator = Coordinator(
        CoordinatorConfig(**({"drain_s": 2.0, "join_token": TEST_TOKEN} | settings)),
        (EOS,),
        on_failure=must_not_fail,
    )
    await coordinator.start()
    live = Live(coordinator)
    try:
        yield live, coordinator
    finally:
        await coordinator.drain_and_stop()
        for worker in live.workers:
            worker.die()


async def until(is_true: Callable[[], bool]) -> None:
    """Lets the event loop run until it is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_true():  # noqa: ASYNC110  # what is waited for is the coordinator's own business
            await asyncio.sleep(0.005)


def request(coordinator: Coordinator, request_id: str = "r", max_tokens: int = 5) -> Submission:
    now = coordinator.now()
    return Submission(request_id, (7, 8, 9), SamplingParams(max_tokens=max_tokens, seed=1), now, now, now)


async def read(outputs: AsyncIterator[Output]) -> tuple[list[int], Output]:
    """All tokens, and the last output."""
    tokens: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        async for output in outputs:
            assert output.first_index == len(tokens)
            tokens += output.token_ids
            last = output
    return tokens, last
