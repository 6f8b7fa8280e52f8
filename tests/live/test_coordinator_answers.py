"""How requests end on a live coordinator: cancelled, cut, stopped, read slowly, met by a bug, refused at once."""

from __future__ import annotations

import asyncio

import pytest
from support.live_coordinator import DEADLINE_S, read, request, running, until

from twinpool.config import Role
from twinpool.coordinator.delivery import Delivery
from twinpool.coordinator.service import Output
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import (
    ClientTooSlow,
    QueueFull,
    RequestFailed,
    UnknownRequest,
)
from twinpool.messages import (
    Cancel,
    Dropped,
    LinkReady,
    Peers,
    StepTokens,
    Token,
    Welcome,
)
from twinpool.request import FinishReason, RequestKey


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
        coordinator._shell._emit("broken", Output((7,), 0))  # as a bug would, behind the core's back
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
