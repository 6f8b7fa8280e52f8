"""Health is bad while work stands still, says what does, and recovers by itself."""

from __future__ import annotations

import msgspec
import pytest
from support.coordinator_core import CoreDriver, stats

from twinpool.messages import Heartbeat
from twinpool.request import FinishReason

STALL_S = 3.0


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver(stall_s=STALL_S, lease_s=60.0)
    driver.pair()
    return driver


def health(driver: CoreDriver) -> tuple[bool, str]:
    return driver.core.health(driver.now)


def test_with_nothing_to_do_all_is_well_even_without_workers() -> None:
    driver = CoreDriver(stall_s=STALL_S)
    driver.advance(100.0)
    assert health(driver)[0]


def test_a_request_after_a_long_idle_time_has_its_own_time(driver: CoreDriver) -> None:
    driver.advance(50.0)
    driver.submit()
    driver.advance(STALL_S - 0.1)
    assert health(driver)[0]


def test_work_that_nothing_moves_is_bad_until_something_does(driver: CoreDriver) -> None:
    driver.submit()
    driver.advance(STALL_S)
    is_well, what = health(driver)
    assert not is_well
    assert "1 request(s) wait, and nothing has moved for 3 s" in what
    driver.token("P", 0)
    assert health(driver)[0]


def test_steps_are_progress_before_the_first_token_and_heartbeats_alone_are_not(driver: CoreDriver) -> None:
    driver.submit()
    for num_steps in (1.0, 2.0, 3.0):
        driver.advance(STALL_S - 0.5)
        driver.say("P", Heartbeat(stats(steps_total=num_steps)))
        assert health(driver)[0]
    for _ in range(3):
        driver.advance(1.0)
        driver.say("P", Heartbeat(stats(steps_total=3.0)))
    assert not health(driver)[0]


def test_a_worker_that_says_it_stands_still_is_named_while_others_get_on(driver: CoreDriver) -> None:
    driver.submit("a")
    driver.submit("b", first=500)
    driver.say("D", Heartbeat(msgspec.structs.replace(stats(), stalled_s=STALL_S + 1)))
    driver.token("P", 0, request_id="a")
    assert health(driver) == (False, "decode worker D has not got on for 4 s")
    driver.say("D", Heartbeat(stats()))
    assert health(driver)[0]


def test_a_pool_without_worker_is_bad_while_somebody_waits_for_it(driver: CoreDriver) -> None:
    driver.submit()
    driver.lose("D")
    is_well, what = health(driver)
    assert not is_well
    assert "decode pool is empty" in what
    driver.abandon()
    driver.answer_cancels()
    assert health(driver)[0]
    driver.assert_empty()


def test_streams_that_go_on_do_not_need_the_other_pool(driver: CoreDriver) -> None:
    driver.submit()
    driver.token("P", 0)
    driver.handoff()
    driver.lose("P")
    driver.token("D", 1)
    assert health(driver) == (True, "1 request(s) make progress")


def test_an_answer_at_the_end_is_no_standstill_later(driver: CoreDriver) -> None:
    driver.submit()
    driver.token("P", 0, FinishReason.STOP)
    driver.answer_cancels()
    driver.advance(100.0)
    assert health(driver)[0]
