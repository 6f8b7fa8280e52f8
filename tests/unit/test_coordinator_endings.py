"""How requests end at the coordinator, once each, whoever says so first; every test ends with nothing held."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.coordinator.events import Abandoned, Completed, Drain, Event, Shutdown
from twinpool.errors import NoWorker
from twinpool.messages import Left, Stop
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestState


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver()
    driver.pair()
    return driver


def test_a_job_that_a_worker_refuses_fails_with_its_words(driver: CoreDriver) -> None:
    driver.submit()
    driver.dropped("D", "refused")
    assert driver.finish() is FinishReason.ERROR
    driver.answer_cancels()
    assert driver.state() is RequestState.FAILED
    driver.assert_empty()


def test_a_stop_string_completes_without_another_output(driver: CoreDriver) -> None:
    driver.submit(max_tokens=9)
    driver.token("P", 0)
    driver.handoff()
    driver.token("D", 1)
    driver.token("D", 2)
    driver.complete(2)
    assert driver.tokens() == [1000, 1001, 1002]
    assert driver.finish() is None
    driver.token("D", 3)  # crosses the Cancel
    assert len(driver.tokens()) == 3
    driver.answer_cancels()
    assert driver.state() is RequestState.COMPLETED
    timeline = driver.core.timeline("r")
    assert timeline is not None
    assert (timeline.num_output_tokens, timeline.finish) == (2, FinishReason.STOP)
    assert driver.count(CoordinatorMetric.TOKENS_DELIVERED) == 3
    assert driver.count(CoordinatorMetric.TOKENS_BEHIND_STOP) == 1
    driver.assert_empty()


def test_a_stop_string_found_after_the_last_token_corrects_the_count(driver: CoreDriver) -> None:
    driver.submit(max_tokens=1)
    driver.token("P", 0, FinishReason.LENGTH)
    driver.answer_cancels()
    driver.complete(1)
    timeline = driver.core.timeline("r")
    assert timeline is not None
    assert (timeline.num_output_tokens, timeline.finish) == (1, FinishReason.STOP)
    assert driver.count(CoordinatorMetric.REQUESTS, "completed") == 1
    driver.assert_empty()


def test_a_stop_string_found_after_the_time_was_up_is_what_the_client_pays_for(driver: CoreDriver) -> None:
    """Its reader is behind: it finds the end of the answer before it sees that the time is up."""
    driver.submit(max_tokens=9)
    driver.token("P", 0)
    driver.handoff()
    for index in (1, 2, 3):
        driver.token("D", index)
    driver.do(Shutdown())
    assert driver.finish() is FinishReason.TIMEOUT
    driver.complete(2)
    driver.answer_cancels()
    timeline = driver.core.timeline("r")
    assert timeline is not None
    assert timeline.num_output_tokens == 2
    assert driver.count(CoordinatorMetric.TOKENS_BEHIND_STOP) == 2
    driver.assert_empty()


def test_draining_admits_nothing_and_finishes_what_runs(driver: CoreDriver) -> None:
    driver.submit("a", max_tokens=1)
    driver.do(Drain())
    driver.submit("b")
    assert isinstance(driver.refusals["b"], NoWorker)
    driver.token("P", 0, FinishReason.LENGTH, request_id="a")
    driver.answer_cancels()
    assert driver.core.num_live == 0
    driver.sent.clear()
    driver.do(Shutdown())
    assert [(s.worker_id, s.message) for s in driver.sent] == [("P", Stop()), ("D", Stop())]
    driver.say("P", Left("stopped"))
    driver.say("D", Left("stopped"))
    assert len(driver.core.registry) == 0
    driver.assert_empty()


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [(Completed("r", 1), Completed("r", 1)), (Completed("r", 1), Abandoned("r")),
     (Abandoned("r"), Abandoned("r")), (Abandoned("r"), Completed("r", 1))],
)  # fmt: skip
def test_the_gateway_may_end_a_request_twice_or_late(
    driver: CoreDriver, first: Event, second: Event, has_ended: bool
) -> None:
    driver.submit(max_tokens=2)
    driver.token("P", 0)
    driver.handoff()
    if has_ended:
        driver.token("D", 1, FinishReason.LENGTH)
    driver.do(first)
    sent, outputs, finish = len(driver.sent), len(driver.outputs["r"]), driver.core.timeline("r").finish
    driver.do(second)
    assert (len(driver.sent), len(driver.outputs["r"])) == (sent, outputs)
    driver.answer_cancels()
    assert driver.do(first) == driver.do(second) == []
    timeline = driver.core.timeline("r")
    if has_ended or first == Completed("r", 1):
        assert driver.state() is RequestState.COMPLETED
    else:
        assert (driver.state(), timeline.finish) == (RequestState.CANCELLED, finish)
    assert sum(driver.core.tally.counts(CoordinatorMetric.REQUESTS).values()) == 1
    assert driver.count(CoordinatorMetric.TOKENS_BEHIND_STOP) == (
        has_ended and 2 - timeline.num_output_tokens
    )
    driver.assert_empty()


def test_shutdown_ends_every_stream_with_an_error(driver: CoreDriver) -> None:
    driver.submit()
    driver.do(Shutdown())
    assert driver.finish() is FinishReason.TIMEOUT
    driver.answer_cancels()
    assert driver.state() is RequestState.TIMED_OUT
    driver.assert_empty()
