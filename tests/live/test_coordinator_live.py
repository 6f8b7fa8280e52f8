"""The coordinator over real sockets, with workers that are only a connection each."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio
from support.coordinator_core import stats
from support.join_token import TEST_TOKEN
from support.live_coordinator import read, request, running, until

from twinpool.channel import _Keys
from twinpool.config import Role
from twinpool.errors import (
    InvariantViolation,
    NoWorker,
    RequestFailed,
    UnknownRequest,
)
from twinpool.messages import (
    Cancel,
    Denied,
    Heartbeat,
    Reserve,
    StartAnew,
    StepTokens,
    Stop,
    Token,
    Welcome,
)
from twinpool.request import FinishReason, RequestKey


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
