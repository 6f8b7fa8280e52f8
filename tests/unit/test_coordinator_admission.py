"""Who may wait at the coordinator, how long, and what a refused request is told."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.config import Role
from twinpool.coordinator.events import Drain, Knocked, Shutdown
from twinpool.coordinator.tenants import ANYONE
from twinpool.errors import ContextLengthExceeded, InvalidRequest, NoWorker, QueueFull
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestState


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver()
    driver.pair()
    return driver


def test_no_more_than_max_in_flight_are_on_workers() -> None:
    driver = CoreDriver(max_in_flight=1)
    driver.pair()
    driver.submit("a")
    driver.submit("b")
    assert driver.state("b") is RequestState.QUEUED
    driver.token("P", 0, FinishReason.STOP, request_id="a")
    driver.answer_cancels()
    assert driver.state("b") is RequestState.PREFILLING
    driver.abandon("b")
    driver.answer_cancels()
    driver.assert_empty()


def test_by_default_the_decode_slots_and_an_eighth_more_are_in_flight() -> None:
    """More would have their first token, and then stand still for as long as whole answers take."""
    driver = CoreDriver()
    driver.join("P", Role.PREFILL)
    driver.join("D", Role.DECODE, max_num_seqs=8)
    driver.link("P", "D")
    for i in range(10):
        driver.submit(f"r{i}")
    states = [driver.state(f"r{i}") for i in range(10)]
    assert states.count(RequestState.PREFILLING) == 9
    assert states.count(RequestState.QUEUED) == 1
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_the_queue_is_bounded_in_requests_and_says_when_to_come_back() -> None:
    driver = CoreDriver(max_in_flight=1, max_queue_requests=2, max_wait_s=7.0)
    driver.pair()
    for request_id in ("a", "b", "c", "d"):
        driver.submit(request_id)
    error = driver.refusals["d"]
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 7.0  # nothing measured yet: the longest that anybody waits
    assert driver.count(CoordinatorMetric.REQUESTS, "rejected") == 1
    # One leaves the queue every two seconds: room for one in two seconds.
    for request_id in ("a", "b"):
        driver.advance(2.0)
        driver.heartbeat("P", "D")
        driver.token("P", 0, FinishReason.STOP, request_id=request_id)
        driver.answer_cancels()
    driver.submit("e")
    driver.submit("f")
    driver.submit("g")
    assert isinstance(error := driver.refusals["g"], QueueFull)
    assert error.retry_after_s == pytest.approx(2.0, rel=0.2)
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_a_request_is_refused_before_its_prompt_is_known_when_no_prompt_would_be_taken() -> None:
    driver = CoreDriver(max_in_flight=1, max_queue_requests=2)
    driver.do(Knocked("early", ANYONE, 0))
    assert isinstance(driver.refusals["early"], NoWorker)
    driver.pair()
    for request_id in ("a", "b", "c"):
        driver.do(Knocked(request_id, ANYONE, 0))
        driver.submit(request_id)
    driver.do(Knocked("d", ANYONE, 0))
    driver.submit("e")
    unknown, known = driver.refusals["d"], driver.refusals["e"]
    assert isinstance(unknown, QueueFull)
    assert (unknown.message, unknown.retry_after_s) == (known.message, known.retry_after_s)
    assert driver.refusals.keys() == {"early", "d", "e"}
    assert driver.count(CoordinatorMetric.REQUESTS, "rejected") == 3
    driver.do(Drain())
    driver.do(Knocked("late", ANYONE, 0))
    assert "stopping" in driver.refusals["late"].message
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_the_queue_is_bounded_in_prompt_tokens() -> None:
    driver = CoreDriver(max_in_flight=1, max_queue_tokens=100)
    driver.pair()
    driver.submit("a", num_prompt=90)
    driver.submit("b", num_prompt=90)
    driver.submit("c", num_prompt=11)
    assert "90 prompt tokens wait already, this request has 11" in driver.refusals["c"].message
    driver.submit("d", num_prompt=10)
    assert driver.state("d") is RequestState.QUEUED
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_a_wait_predicted_beyond_the_longest_is_refused_at_once() -> None:
    driver = CoreDriver(max_in_flight=1, max_wait_s=5.0)
    driver.pair()
    for request_id in ("a", "b", "c", "d", "e"):
        driver.submit(request_id)
    for request_id in ("a", "b"):
        driver.advance(2.0)
        driver.heartbeat("P", "D")
        driver.token("P", 0, FinishReason.STOP, request_id=request_id)
        driver.answer_cancels()
    # Two wait, at two seconds each.
    driver.submit("f")
    driver.submit("g")
    assert isinstance(error := driver.refusals["g"], QueueFull)
    assert "predicted wait is 6.0 s and at most 5 s" in error.message
    assert 0 < error.retry_after_s < 2
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_prompts_wait_here_rather_than_at_a_busy_prefill_worker() -> None:
    driver = CoreDriver()
    for worker_id, role in (("P", Role.PREFILL), ("D", Role.DECODE)):
        driver.join(worker_id, role, num_blocks=4096, max_model_len=65536)
    driver.link("P", "D")
    for i in range(3):
        driver.submit(f"r{i}", num_prompt=9000, first=10_000 * i)
    assert [driver.state(f"r{i}") for i in range(3)] == ["prefilling", "queued", "queued"]
    driver.report(request_id="r0")
    assert [driver.state(f"r{i}") for i in range(3)] == ["prefilling", "prefilling", "queued"]
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_who_waits_too_long_is_timed_out_with_an_error_like_429() -> None:
    driver = CoreDriver(max_in_flight=1, max_wait_s=3.0)
    driver.pair()
    driver.submit("a")
    driver.submit("b")
    driver.heartbeat("P", "D")
    driver.advance(3.1)
    assert driver.finish("b") is FinishReason.TIMEOUT
    error = driver.outputs["b"][-1].error
    assert isinstance(error, QueueFull)
    assert driver.state("b") is RequestState.TIMED_OUT
    assert driver.finish("a") is None
    driver.abandon("a")
    driver.answer_cancels()
    driver.assert_empty()


def test_what_never_fits_is_refused_with_the_numbers(driver: CoreDriver) -> None:
    driver.submit("long", num_prompt=500, max_tokens=13)
    error = driver.refusals["long"]
    assert isinstance(error, ContextLengthExceeded)
    assert "500" in error.message
    assert "13" in error.message
    assert "512" in error.message
    driver.submit("fits", num_prompt=500, max_tokens=12)
    assert "fits" not in driver.refusals
    driver.abandon("fits")
    driver.answer_cancels()
    driver.assert_empty()


def test_what_is_larger_than_a_pool_is_refused_with_both_numbers() -> None:
    driver = CoreDriver()
    driver.join("P", Role.PREFILL)
    driver.join("D", Role.DECODE, num_blocks=4)
    driver.link("P", "D")
    driver.submit(num_prompt=60, max_tokens=6)
    error = driver.refusals["r"]
    assert isinstance(error, InvalidRequest)
    assert "65 KV slots" in error.message
    assert "64" in error.message
    driver.submit("fits", num_prompt=60, max_tokens=5)
    assert "fits" not in driver.refusals


def test_without_workers_the_answer_is_503_and_says_what_is_missing() -> None:
    driver = CoreDriver()
    missing = {}
    for step in ("none", "prefill", "unlinked"):
        if step == "prefill":
            driver.join("P", Role.PREFILL)
        if step == "unlinked":
            driver.join("D", Role.DECODE)
        driver.submit(step)
        error = driver.refusals[step]
        assert isinstance(error, NoWorker)
        missing[step] = error.message
    assert "no worker has registered" in missing["none"]
    assert "decode pool is empty" in missing["prefill"]
    assert "linked" in missing["unlinked"]
    driver.assert_empty()
