"""The stream between the core and one reader, and the metrics text."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from support.coordinator_core import CoreDriver, stats
from support.jobs import told

from twinpool.config import Role
from twinpool.coordinator.exposition import Exposition
from twinpool.coordinator.service import Output
from twinpool.coordinator.streams import OutputStream
from twinpool.coordinator.tenants import Tenant
from twinpool.errors import InvariantViolation
from twinpool.messages import Heartbeat
from twinpool.metrics import WorkerMetric
from twinpool.request import FinishReason


async def test_what_is_not_read_yet_grows_into_one_output() -> None:
    stream = OutputStream()
    stream.put(Output((1,), 0))
    assert await anext(stream) == Output((1,), 0)
    stream.put(Output((2, 3), 1))
    stream.put(Output((4,), 3))
    stream.put(Output((), 4, FinishReason.LENGTH))
    assert await anext(stream) == Output((2, 3, 4), 1, FinishReason.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_log_probabilities_grow_with_their_tokens_and_those_of_the_prompt_are_read_once() -> None:
    prompt = (told(5, 1), told(6, 1))
    stream = OutputStream()
    stream.put(Output((1,), 0, logprobs=(told(1, 2),), prompt_logprobs=prompt))
    stream.put(Output((2, 3), 1, logprobs=(told(2, 2), told(3, 2))))
    assert await anext(stream) == Output(
        (1, 2, 3), 0, None, None, (told(1, 2), told(2, 2), told(3, 2)), prompt
    )
    stream.put(Output((4,), 3, logprobs=(told(4, 2),)))
    stream.put(Output((), 4, FinishReason.LENGTH))
    assert await collect(stream) == [Output((4,), 3, FinishReason.LENGTH, None, (told(4, 2),))]


async def test_log_probabilities_that_are_taken_at_once_do_not_come_again() -> None:
    stream = OutputStream(lambda output: not output.first_index)
    stream.put(Output((1,), 0, logprobs=(told(1, 0),), prompt_logprobs=(told(9, 0),)))
    stream.put(Output((2,), 1, FinishReason.STOP, None, (told(2, 0),)))
    assert await collect(stream) == [Output((2,), 1, FinishReason.STOP, None, (told(2, 0),))]


async def test_a_waiting_reader_wakes_for_tokens_and_for_the_close() -> None:
    stream = OutputStream()
    reader = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    stream.put(Output((1,), 0))
    await asyncio.sleep(0)
    stream.close()
    assert await reader == [Output((1,), 0)]


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    stream = OutputStream()
    reader = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.put(Output((1,), 0, FinishReason.STOP))
    assert await collect(stream) == [Output((1,), 0, FinishReason.STOP)]


@pytest.mark.parametrize("first_index", [0, 2])
def test_a_doubled_or_missing_token_is_a_violation(first_index: int) -> None:
    stream = OutputStream()
    stream.put(Output((1,), 0))
    with pytest.raises(InvariantViolation, match="expected 1"):
        stream.put(Output((1,), first_index))


async def test_what_is_taken_at_once_wakes_no_reader() -> None:
    taken: list[Output] = []

    def take(output: Output) -> bool:
        if output.first_index != 2:
            taken.append(output)
        return output.first_index != 2

    stream = OutputStream(take)
    for output in (Output((1, 2), 0), Output((3,), 2), Output((4,), 3)):
        stream.put(output)
    assert taken == [Output((1, 2), 0)]  # the third waits behind the second, which was left to the reader
    assert await anext(stream) == Output((3, 4), 2)
    stream.put(Output((5,), 4))
    stream.put(Output((6,), 5, FinishReason.STOP))
    assert taken[1:] == [Output((5,), 4)]
    assert await collect(stream) == [Output((6,), 5, FinishReason.STOP)]


async def test_what_taking_raises_is_the_readers_and_ends_the_stream() -> None:
    def take(_: Output) -> bool:
        raise KeyError("a bug")

    stream = OutputStream(take)
    stream.put(Output((1,), 0))
    stream.put(Output((2,), 1, FinishReason.STOP))
    with pytest.raises(KeyError, match="a bug"):
        await anext(stream)
    assert await collect(stream) == []


def test_nothing_may_follow_the_last_output() -> None:
    stream = OutputStream()
    stream.put(Output((1,), 0, FinishReason.STOP))
    with pytest.raises(InvariantViolation, match="behind the last one"):
        stream.put(Output((2,), 1))


def test_a_restarted_worker_makes_no_counter_fall() -> None:
    driver = CoreDriver()
    exposition = Exposition(driver.core, Counter({WorkerMetric.JUNK_MESSAGES: 2}), lambda: driver.now)
    seen = []
    for incarnation, values in (("a", (5.0, 9.0)), ("b", (1.0,))):
        driver.join("P", Role.PREFILL, incarnation)
        for value in values:
            driver.say("P", Heartbeat(stats(steps_total=value)))
            seen.append(sample(exposition, 'twinpool_steps_total{role="prefill",worker="P"}'))
    driver.lose("P")
    seen.append(sample(exposition, 'twinpool_steps_total{role="prefill",worker="P"}'))
    assert seen == [5.0, 9.0, 10.0, 10.0]
    assert sample(exposition, 'twinpool_workers_lost_total{role="prefill"}') == 2.0
    assert sample(exposition, 'twinpool_junk_messages_total{role="coordinator",worker="coordinator"}') == 2.0


def test_the_metrics_count_what_lives_and_waits() -> None:
    driver = CoreDriver(max_in_flight=1)
    driver.pair()
    driver.heartbeat("P", "D")
    driver.submit("a", num_prompt=10)
    driver.submit("b", num_prompt=20)
    exposition = Exposition(driver.core, Counter(), lambda: driver.now)
    assert sample(exposition, 'twinpool_requests_live{state="prefilling"}') == 1.0
    assert sample(exposition, 'twinpool_requests_live{state="queued"}') == 1.0
    assert sample(exposition, "twinpool_queue_prompt_tokens") == 20.0
    assert sample(exposition, "twinpool_admitted_prompt_tokens_total") == 30.0
    assert sample(exposition, 'twinpool_worker_attempts_held{role="decode",worker="D"}') == 1.0
    assert sample(exposition, 'twinpool_kv_blocks{role="decode",state="free",worker="D"}') == 64.0
    assert sample(exposition, 'twinpool_worker_prompt_tokens_waiting{role="prefill",worker="P"}') == 7.0
    assert sample(exposition, 'twinpool_workers{role="decode"}') == 1.0


def test_the_metrics_tell_tenants_refusals_and_cancelled_work_apart() -> None:
    driver = CoreDriver(max_in_flight=2, retry_budget=5)
    driver.pair()
    acme = Tenant("acme", requests_per_minute=2)
    for request_id in ("a", "b", "c"):
        driver.submit(request_id, num_prompt=10, tenant=acme)
    driver.submit("d", num_prompt=20, tenant=Tenant("other"))
    driver.token("P", 0, request_id="a")
    driver.dropped("P", "transfer", request_id="b")
    driver.cancel("a", "acme")
    exposition = Exposition(driver.core, Counter(), lambda: driver.now)
    assert sample(exposition, 'twinpool_admission_refused_total{reason="quota_exceeded"}') == 1.0
    assert sample(exposition, 'twinpool_tenant_tokens_served_total{tenant="acme"}') == 21.0
    assert sample(exposition, 'twinpool_tenant_queue_requests{tenant="other"}') == 1.0
    assert sample(exposition, 'twinpool_cancelled_attempts_held{role="decode",worker="D"}') == 2.0
    assert sample(exposition, "twinpool_retry_budget_left") == 4.0
    assert sample(exposition, "twinpool_healthy") == 1.0


async def collect(stream: OutputStream) -> list[Output]:
    return [output async for output in stream]


def sample(exposition: Exposition, name: str) -> float:
    """The value on the line that starts with `name`."""
    (line,) = [line for line in exposition.text().decode().splitlines() if line.startswith(f"{name} ")]
    return float(line.removeprefix(name))
