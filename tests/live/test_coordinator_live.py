"""The coordinator over real sockets, with workers that are only a connection each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import zmq
import zmq.asyncio
from support.coordinator_core import EOS, register, stats
from support.http_gateway import must_not_fail
from support.join_token import TEST_TOKEN

from twinpool.channel import DealerChannel, _Keys
from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.server import Coordinator
from twinpool.coordinator.service import Output, Submission
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import (
    ClientTooSlow,
    InvariantViolation,
    NoWorker,
    QueueFull,
    RequestFailed,
    UnknownRequest,
)
from twinpool.messages import (
    Cancel,
    Denied,
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
    StartAnew,
    StepTokens,
    Stop,
    Token,
    Welcome,
)
from twinpool.request import FinishReason, Job, RequestKey, SamplingParams

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


async def test_a_request_streams_through_two_workers_and_everything_stops_at_the_end() -> None:
    async with running() as (live, coordinator):
        assert coordinator.ready() == (False, "no worker has registered yet, or all are lost")
        with pytest.raises(NoWorker):
            coordinator.submit(request(coordinator))
        with pytest.raises(NoWorker):
            _ = coordinator.max_model_len
        prefill = live.worker("prefill-0", Role.PREFILL, serves=True)
        decode = live.worker("decode-0", Role.DECODE, serves=True)
        await until(lambda: coordinator.ready()[0])
        assert coordinator.max_model_len == 512
        outputs = coordinator.submit(request(coordinator))
        tokens, last = await read(outputs)
        coordinator.delivered("r")
        assert tokens == [100, 101, 102, 103, 104]
        assert last.finish is FinishReason.LENGTH
        timeline = coordinator.timeline("r")
        assert timeline["state"] == "completed"
        assert timeline["transfer"]["gb_per_s"] == pytest.approx(1.048576)
        stages = timeline["stages_s"]
        until_first = [stages[s] for s in ("validate", "tokenize", "queue", "prefill", "deliver")]
        assert sum(round(s * 1e6) for s in until_first) == round(timeline["ttft_s"] * 1e6)
        text = coordinator.metrics_text().decode()
        assert 'twinpool_requests_total{outcome="completed"} 1.0' in text
        assert "twinpool_delivered_tokens_total 5.0" in text
        assert 'twinpool_steps_total{role="decode",worker="decode-0"} 3.0' in text
        assert 'twinpool_ttft_seconds_bucket{le="+Inf"} 1.0' in text
        assert "twinpool_itl_seconds_count 4.0" in text
        assert (
            'twinpool_link_gb_per_s{decode="decode-0",prefill="prefill-0",transport="loopback"} 5.0' in text
        )
        with pytest.raises(UnknownRequest):
            coordinator.timeline("nobody")
    for worker in (prefill, decode):
        assert isinstance(worker.received[-1], Stop)


async def test_a_worker_with_another_model_is_told_both_names() -> None:
    async with running() as (live, _):
        first = live.worker("decode-0", Role.DECODE)
        await first.got(Welcome)
        other = live.worker("decode-1", Role.DECODE, fingerprint="model-2")
        denied = await other.got(Denied)
        assert "model-2" in denied.reason
        assert "model-1" in denied.reason


async def test_an_id_that_the_gateway_gives_twice_is_a_bug_and_the_first_request_goes_on() -> None:
    async with running() as (live, coordinator):
        live.worker("prefill-0", Role.PREFILL, serves=True)
        live.worker("decode-0", Role.DECODE, serves=True)
        await until(lambda: coordinator.ready()[0])
        outputs = coordinator.submit(request(coordinator))
        with pytest.raises(InvariantViolation, match="two requests at once have the id 'r'"):
            coordinator.submit(request(coordinator))
        tokens, last = await read(outputs)
        assert tokens == [100, 101, 102, 103, 104]
        assert last.finish is FinishReason.LENGTH


async def test_a_silent_worker_is_lost_after_its_lease_and_its_requests_fail_clearly() -> None:
    async with running(heartbeat_s=0.1, lease_s=0.3, max_attempts=1) as (live, coordinator):
        prefill = live.worker("prefill-0", Role.PREFILL, serves=True)
        decode = live.worker("decode-0", Role.DECODE)
        await until(lambda: coordinator.ready()[0])
        outputs = coordinator.submit(request(coordinator))
        await decode.got(Reserve)
        decode.fall_silent()
        tokens, last = await read(outputs)
        assert tokens == []
        assert last.finish is FinishReason.ERROR
        assert isinstance(last.error, RequestFailed)
        assert "decode-0 no sign of life for 0.3 s" in last.error.message
        assert coordinator.ready() == (False, "the decode pool is empty")
        await prefill.got(Cancel)
        await until(lambda: coordinator.timeline("r")["state"] == "failed")
        decode.say(Heartbeat(stats()))
        await decode.got(StartAnew)


async def test_a_worker_whose_exit_was_seen_is_lost_at_once_and_another_goes_on() -> None:
    async with running(lease_s=60.0) as (live, coordinator):
        live.worker("prefill-0", Role.PREFILL, serves=True)
        hanging = live.worker("decode-0", Role.DECODE, pid=77)
        await until(lambda: coordinator.ready()[0])
        outputs = coordinator.submit(request(coordinator))
        await hanging.got(Reserve)
        serving = live.worker("decode-1", Role.DECODE, serves=True, pid=78)
        await serving.got(Welcome)
        hanging.die()
        coordinator.worker_exited("decode-0", 76, "an older process of that name")
        assert b'twinpool_workers{role="decode"} 2.0' in coordinator.metrics_text()
        coordinator.worker_exited("decode-0", 77, "killed by SIGKILL")
        tokens, last = await read(outputs)
        assert tokens == [100, 101, 102, 103, 104]
        assert last.finish is FinishReason.LENGTH
        attempts = coordinator.timeline("r")["attempts"]
        assert [a["decode_worker"] for a in attempts] == ["decode-0", "decode-1"]
        assert "killed by SIGKILL" in attempts[0]["ended"]
        assert 'twinpool_attempts_lost_total{reason="worker lost"} 1.0' in coordinator.metrics_text().decode()


async def test_an_abandoned_request_is_cancelled_on_both_workers() -> None:
    async with running() as (live, coordinator):
        prefill = live.worker("prefill-0", Role.PREFILL)
        decode = live.worker("decode-0", Role.DECODE)
        await prefill.got(Peers)
        await decode.got(Welcome)
        prefill.say(LinkReady("decode-0", "1", "loopback", 1.0, 1))
        await until(lambda: coordinator.ready()[0])
        outputs = coordinator.submit(request(coordinator))
        coordinator.abandon("r")
        coordinator.abandon("r")
        _, last = await read(outputs)
        assert last.finish is FinishReason.CANCELLED
        for worker in (prefill, decode):
            cancel = await worker.got(Cancel)
            worker.say(Dropped(cancel.key, "cancelled"))
        await until(lambda: coordinator.timeline("r")["state"] == "cancelled")


async def test_a_request_is_cancelled_by_its_tenant_alone_and_cut_by_the_gateway() -> None:
    async with running() as (live, coordinator):
        worker = live.worker("colocated-0", Role.COLOCATED)
        await until(lambda: coordinator.ready()[0])
        for request_id, finish in (("cancelled", FinishReason.CANCELLED), ("cut", FinishReason.ERROR)):
            outputs = coordinator.submit(request(coordinator, request_id))
            with pytest.raises(UnknownRequest):
                coordinator.cancel(request_id, Tenant("somebody else"))
            if request_id == "cut":
                coordinator.cut(request_id, ClientTooSlow("it takes nothing"))
            else:
                coordinator.cancel(request_id, ANYONE)
            tokens, last = await read(outputs)
            assert (tokens, last.finish) == ([], finish)
            worker.say(Dropped(RequestKey(request_id, 1), "cancelled"))
        await until(lambda: coordinator.timeline("cut")["state"] == "failed")
        coordinator.cancel("cancelled", ANYONE)  # has ended: nothing to do
        assert coordinator.timeline("cancelled")["state"] == "cancelled"
        assert coordinator.health() == (True, "there is nothing to do")
        text = coordinator.metrics_text().decode()
        assert 'twinpool_cancelled_attempts_held{role="colocated",worker="colocated-0"} 0.0' in text
        assert "twinpool_healthy 1.0" in text


async def test_a_bug_at_one_request_ends_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (live, coordinator):
        worker = live.worker("colocated-0", Role.COLOCATED)
        await until(lambda: coordinator.ready()[0])
        broken, sound = (coordinator.submit(request(coordinator, name, 2)) for name in ("broken", "sound"))
        with monkeypatch.context() as bug:
            bug.setattr(Delivery, "take", lambda *_: {}["no such key"])
            worker.say(StepTokens((Token(RequestKey("broken", 1), 0, 100),)))
            await until(lambda: b'violations_total{role="coordinator",worker="coordinator"} 1' in (
                coordinator.metrics_text()
            ))  # fmt: skip
        coordinator._emit("broken", Output((7,), 0))  # as a bug would, behind the core's back
        worker.say(StepTokens((Token(RequestKey("broken", 1), 0, 100),)))
        tokens, last = await read(broken)
        assert (tokens, last.finish) == ([7], FinishReason.ERROR)
        assert isinstance(last.error, RequestFailed)
        worker.say(Dropped((await worker.got(Cancel)).key, "cancelled"))
        worker.say(StepTokens((Token(RequestKey("sound", 1), 0, 100),)))
        worker.say(StepTokens((Token(RequestKey("sound", 1), 1, 101, FinishReason.LENGTH),)))
        assert (await read(sound))[0] == [100, 101]
        await until(lambda: coordinator.timeline("broken")["state"] == "failed")


async def test_an_answer_that_ends_while_its_tokens_come_takes_no_more_of_the_same_step() -> None:
    async with running() as (live, coordinator):
        worker = live.worker("colocated-0", Role.COLOCATED)
        await until(lambda: coordinator.ready()[0])
        taken: list[Output] = []

        def take(output: Output) -> bool:
            taken.append(output)
            coordinator.complete("r", 1)
            return True

        outputs = coordinator.submit(request(coordinator, max_tokens=3), take)
        worker.say(StepTokens(tuple(Token(RequestKey("r", 1), i, 100 + i) for i in range(2))))
        async with asyncio.timeout(DEADLINE_S):
            assert [output async for output in outputs] == []
        assert taken == [Output((100,), 0)]
        worker.say(Dropped((await worker.got(Cancel)).key, "cancelled"))
        await until(lambda: coordinator.timeline("r")["state"] == "completed")
        assert coordinator.timeline("r")["num_output_tokens"] == 1
        assert b'violations_total{role="coordinator",worker="coordinator"}' not in coordinator.metrics_text()


async def test_a_stop_string_ends_the_iterator_without_another_output() -> None:
    async with running() as (live, coordinator):
        worker = live.worker("colocated-0", Role.COLOCATED)
        await until(lambda: coordinator.ready()[0])
        outputs = coordinator.submit(request(coordinator, max_tokens=50))
        key = RequestKey("r", 1)
        worker.say(StepTokens((Token(key, 0, 100),)))
        async with asyncio.timeout(DEADLINE_S):
            first = await anext(outputs)
        assert first == Output((100,), 0)
        coordinator.complete("r", 1)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        worker.say(Dropped((await worker.got(Cancel)).key, "cancelled"))
        await until(lambda: coordinator.timeline("r")["state"] == "completed")
        assert coordinator.timeline("r")["finish_reason"] == "stop"


async def test_a_slow_reader_gets_all_its_tokens_in_one_output() -> None:
    async with running() as (live, coordinator):
        live.worker("prefill-0", Role.PREFILL, serves=True)
        live.worker("decode-0", Role.DECODE, serves=True)
        await until(lambda: coordinator.ready()[0])
        outputs = coordinator.submit(request(coordinator, max_tokens=300))
        await until(lambda: coordinator.timeline("r")["state"] == "completed")
        async with asyncio.timeout(DEADLINE_S):
            output = await anext(outputs)
        assert output == Output(tuple(range(100, 400)), 0, FinishReason.LENGTH)
        coordinator.complete("r", 7)  # a stop string in what the core gave away long ago
        for name in ("r", "r", "nobody"):
            coordinator.abandon(name)
            coordinator.complete(name, 7)
            coordinator.delivered(name)
        timeline = coordinator.timeline("r")
        assert (timeline["state"], timeline["finish_reason"]) == ("completed", "stop")
        assert timeline["num_output_tokens"] == 7
        text = coordinator.metrics_text().decode()
        assert 'twinpool_requests_total{outcome="completed"} 1.0' in text
        assert "twinpool_delivered_tokens_behind_stop_total 293.0" in text


async def test_a_full_queue_refuses_at_once_and_keeps_the_others() -> None:
    async with running(max_in_flight=1, max_queue_requests=1) as (live, coordinator):
        worker = live.worker("colocated-0", Role.COLOCATED)
        await until(lambda: coordinator.ready()[0])
        for request_id in ("a", "b"):
            coordinator.submit(request(coordinator, request_id))
        with pytest.raises(QueueFull) as caught:
            coordinator.submit(request(coordinator, "c"))
        assert caught.value.retry_after_s > 0
        assert coordinator.timeline("b")["state"] == "queued"
        for request_id in ("a", "b"):
            coordinator.abandon(request_id)
        worker.say(Dropped((await worker.got(Cancel)).key, "cancelled"))
        await until(lambda: coordinator.timeline("a")["state"] == "cancelled")


async def test_junk_of_one_who_has_the_join_token_is_counted_and_harmless() -> None:
    async with running() as (live, coordinator):
        keys = _Keys(TEST_TOKEN)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        socket.connect(coordinator.endpoint)
        for junk in (b"", b"\xff" * 100, b"\x81\xa4type\xa4Nope"):
            await socket.send(junk)
        await until(
            lambda: (
                b'junk_messages_total{role="coordinator",worker="coordinator"} 3.0'
                in coordinator.metrics_text()
            )
        )
        socket.close()
        context.term()
        worker = live.worker("colocated-0", Role.COLOCATED)
        await worker.got(Welcome)


async def test_draining_lets_streams_end_and_times_out_the_rest() -> None:
    async with running(drain_s=0.5) as (live, coordinator):
        worker = live.worker("colocated-0", Role.COLOCATED)
        await until(lambda: coordinator.ready()[0])
        ends, hangs = (coordinator.submit(request(coordinator, r, max_tokens=2)) for r in ("ends", "hangs"))
        await until(lambda: len(worker.received) >= 3)
        stopping = asyncio.create_task(coordinator.drain_and_stop())
        await until(lambda: not coordinator.ready()[0])
        with pytest.raises(NoWorker):
            coordinator.submit(request(coordinator, "late"))
        key = RequestKey("ends", 1)
        worker.say(StepTokens((Token(key, 0, 100), Token(key, 1, 101, FinishReason.LENGTH))))
        tokens, last = await read(ends)
        assert (tokens, last.finish) == ([100, 101], FinishReason.LENGTH)
        _, last = await read(hangs)
        assert last.finish is FinishReason.TIMEOUT
        await worker.got(Stop)
        await stopping


async def test_cancelling_the_drain_stops_at_once_but_in_order() -> None:
    async with running(drain_s=60.0) as (live, coordinator):
        worker = live.worker("colocated-0", Role.COLOCATED)
        await until(lambda: coordinator.ready()[0])
        outputs = coordinator.submit(request(coordinator))
        stopping = asyncio.create_task(coordinator.drain_and_stop())
        await until(lambda: not coordinator.ready()[0])
        stopping.cancel()
        _, last = await read(outputs)
        assert last.finish is FinishReason.TIMEOUT
        await worker.got(Stop)
        with pytest.raises(asyncio.CancelledError):
            await stopping
