"""Answers that must be complete by a time: refused at once if they cannot be, ended wherever they are otherwise."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.errors import DeadlineExceeded, DeadlineUnmeetable, InvalidRequest
from twinpool.messages import PrefillReport
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestKey, RequestState


def queued(driver: CoreDriver) -> None:
    """Waits behind another."""
    driver.submit("other")
    driver.submit(deadline=driver.now + 1.0)


def prefilling(driver: CoreDriver) -> None:
    driver.submit(deadline=driver.now + 1.0)


def transferring(driver: CoreDriver) -> None:
    prefilling(driver)
    driver.token("P", 0)


def decoding(driver: CoreDriver) -> None:
    transferring(driver)
    driver.handoff()
    driver.token("D", 1)


def resumed(driver: CoreDriver) -> None:
    """Waits to be started again: whoever preempted it has no room yet."""
    decoding(driver)
    driver.dropped("D", "preempted")


STATES = {
    RequestState.QUEUED: queued,
    RequestState.PREFILLING: prefilling,
    RequestState.TRANSFERRING: transferring,
    RequestState.DECODING: decoding,
}


@pytest.mark.parametrize("bring", [*STATES.values(), resumed], ids=lambda bring: bring.__name__)
def test_a_deadline_ends_the_request_wherever_it_is_and_releases_both_sides(bring) -> None:  # type: ignore[no-untyped-def]
    driver = CoreDriver(max_in_flight=1)
    driver.pair()
    bring(driver)
    is_running = driver.state() is not RequestState.QUEUED
    num_tokens = len(driver.tokens())
    driver.advance(0.99)
    assert driver.finish() is None
    driver.heartbeat("P", "D")
    driver.advance(0.02)
    assert driver.finish() is FinishReason.TIMEOUT
    error = driver.outputs["r"][-1].error
    assert isinstance(error, DeadlineExceeded)
    assert f"{num_tokens} of at most 4 output tokens" in error.message
    assert driver.answer_cancels() > 0 or not is_running
    assert driver.state() is RequestState.TIMED_OUT
    assert driver.count(CoordinatorMetric.DEADLINES_MISSED) == 1
    driver.abandon("other")
    driver.answer_cancels()
    driver.assert_empty()


def test_an_answer_that_is_complete_in_time_is_not_ended() -> None:
    driver = CoreDriver()
    driver.pair()
    prefilling(driver)
    driver.token("P", 0, FinishReason.STOP)
    driver.advance(2.0)  # while the workers let go
    driver.answer_cancels()
    assert driver.state() is RequestState.COMPLETED
    assert driver.count(CoordinatorMetric.DEADLINES_MISSED) == 0


def test_a_deadline_that_has_passed_is_the_clients_mistake() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit(deadline=driver.now - 0.5)
    error = driver.refusals["r"]
    assert isinstance(error, InvalidRequest)
    assert "passed 0.500 s before" in error.message


def test_a_wait_beyond_the_deadline_is_refused_at_once_and_says_when_to_come_back() -> None:
    driver = CoreDriver(max_in_flight=1)
    driver.pair()
    for i in range(6):
        driver.submit(f"r{i}")
    for i in range(3):
        driver.advance(2.0)
        driver.heartbeat("P", "D")
        driver.say("P", PrefillReport(RequestKey(f"r{i}", 1), 0.0, 0.5, 0, 10, 1))
        driver.token("P", 0, FinishReason.STOP, request_id=f"r{i}")
        driver.answer_cancels()
    # Two wait, one runs, at two seconds each: six seconds of waiting, and half a second for the prompt.
    driver.submit("late", deadline=driver.now + 5.0)
    error = driver.refusals["late"]
    assert isinstance(error, DeadlineUnmeetable)
    assert error.retry_after_s == pytest.approx(1.5 + 0.5)  # the running prompt waits at the worker too
    driver.submit("in time", deadline=driver.now + 7.1)
    assert "in time" not in driver.refusals
    assert driver.count(CoordinatorMetric.REFUSED, "deadline_unmeetable") == 1


def test_a_deadline_before_the_prompt_can_be_computed_is_refused_for_good() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit("r0", num_prompt=100)
    driver.say("P", PrefillReport(RequestKey("r0", 1), 0.0, 3.0, 0, 100, 1))
    driver.submit("r1", num_prompt=100, first=900, deadline=driver.now + 2.0)
    error = driver.refusals["r1"]
    assert isinstance(error, InvalidRequest)
    assert "2.000 s" in error.message
    assert "3.000 s" in error.message
    driver.submit("cached", num_prompt=100, deadline=driver.now + 2.0)  # 64 of its tokens need no computing
    assert "cached" not in driver.refusals


def test_without_evidence_a_deadline_is_believed() -> None:
    driver = CoreDriver(max_in_flight=1)
    driver.pair()
    for i in range(5):
        driver.submit(f"r{i}", deadline=driver.now + 0.01)
    assert not driver.refusals
