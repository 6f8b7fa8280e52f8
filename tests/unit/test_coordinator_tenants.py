"""What a tenant may ask for, whose request goes next, and who may fill the queue."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.coordinator.events import Shutdown
from twinpool.coordinator.tenants import Tenant
from twinpool.errors import InvalidRequest, QueueFull, QuotaExceeded, UnknownRequest
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestState


def one_at_a_time(**settings: object) -> CoreDriver:
    """A driver whose only slot is taken by another tenant's request."""
    driver = CoreDriver(max_in_flight=1, **settings)
    driver.pair()
    driver.submit("first", tenant=Tenant("other"))
    return driver


def order(driver: CoreDriver) -> list[str]:
    """The order in which what waits is sent to workers, each ended at its first token."""
    went = ["first"]
    while True:
        driver.token("P", 0, FinishReason.STOP, request_id=went[-1])
        driver.answer_cancels()
        running = [r for r in driver.core._custody.requests.values() if r.state is RequestState.PREFILLING]
        if not running:
            driver.assert_empty()
            return went[1:]
        went.append(running[0].request_id)


# ── quotas ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_per_minute_are_refilled_all_the_time() -> None:
    tenant = Tenant("a", requests_per_minute=2)
    driver = CoreDriver()
    driver.pair()
    for request_id in ("r1", "r2", "r3"):
        driver.submit(request_id, tenant=tenant)
    error = driver.refusals["r3"]
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after_s == pytest.approx(30.0)
    driver.now += 29.9
    driver.submit("early", tenant=tenant)
    assert driver.refusals["early"].retry_after_s == pytest.approx(0.1)  # type: ignore[attr-defined]
    driver.now += 0.1
    driver.submit("in time", tenant=tenant)
    assert "in time" not in driver.refusals
    driver.submit("another's", tenant=Tenant("b", requests_per_minute=2))
    assert "another's" not in driver.refusals


def test_tokens_per_minute_hold_what_is_asked_for_and_give_back_what_was_not_used() -> None:
    tenant = Tenant("a", tokens_per_minute=100)
    driver = CoreDriver()
    driver.pair()
    driver.submit("r1", num_prompt=10, max_tokens=80, tenant=tenant)
    driver.submit("r2", num_prompt=10, max_tokens=10, tenant=tenant)
    error = driver.refusals["r2"]
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after_s == pytest.approx(6.0)  # 10 tokens are missing
    assert "of 100 tokens per minute 10 are left, and this takes up to 20" in error.message
    driver.token("P", 0, FinishReason.STOP, request_id="r1")  # 79 output tokens are free again
    driver.answer_cancels()
    driver.submit("r3", num_prompt=10, max_tokens=79, tenant=tenant)
    assert "r3" not in driver.refusals
    driver.submit("r4", num_prompt=1, max_tokens=1, tenant=tenant)
    assert isinstance(driver.refusals["r4"], QuotaExceeded)
    driver.do(Shutdown())


def test_answers_that_belong_together_wait_for_quota_for_all_of_them() -> None:
    tenant = Tenant("a", requests_per_minute=6, tokens_per_minute=120)
    driver = CoreDriver()
    driver.pair()
    driver.submit("before", num_prompt=10, max_tokens=20, tenant=tenant)
    together = {"num_prompt": 10, "max_tokens": 20, "tenant": tenant, "num_choices": 3}
    driver.submit("r#0", num_after=2, tokens_after=60, **together)
    driver.submit("r#1", num_after=1, tokens_after=30, **together)
    driver.submit("r#2", **together)
    assert not driver.refusals
    driver.submit("s#0", num_after=2, tokens_after=60, **together)
    error = driver.refusals["s#0"]
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after_s == pytest.approx(45.0)  # 90 tokens are missing; one request is, for 10 s
    driver.now += 45.0
    for number in range(3):
        driver.submit(f"t#{number}", num_after=2 - number, tokens_after=30 * (2 - number), **together)
    assert driver.refusals.keys() == {"s#0"}
    driver.do(Shutdown())


def test_answers_that_belong_together_and_exceed_the_quota_by_themselves_are_refused_for_good() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit("r#0", num_after=2, tenant=Tenant("a", requests_per_minute=2))
    driver.submit("s#0", num_after=2, tokens_after=28, tenant=Tenant("b", tokens_per_minute=40))
    for request_id, said in (
        ("r#0", "3 answers are asked for, and each counts as a request; the quota is 2 requests per minute"),
        ("s#0", "3 answers are asked for, which take up to 42 tokens; the quota is 40 tokens per minute"),
    ):
        error = driver.refusals[request_id]
        assert isinstance(error, InvalidRequest)
        assert said in error.message


def test_what_was_never_sent_to_a_worker_costs_no_tokens() -> None:
    tenant = Tenant("a", tokens_per_minute=100)
    driver = one_at_a_time()
    driver.submit("waits", num_prompt=60, max_tokens=40, tenant=tenant)
    driver.abandon("waits")
    driver.submit("again", num_prompt=60, max_tokens=40, tenant=tenant)
    assert "again" not in driver.refusals
    driver.do(Shutdown())


def test_tokens_behind_a_stop_string_are_not_charged_whenever_it_is_found() -> None:
    for is_behind in (False, True):
        tenant = Tenant("a", tokens_per_minute=20)
        driver = CoreDriver()
        driver.pair()
        driver.submit(num_prompt=10, max_tokens=10, tenant=tenant)
        driver.token("P", 0)
        driver.handoff()
        driver.token("D", 1)
        if is_behind:
            driver.token("D", 2, FinishReason.STOP)
            driver.answer_cancels()
        driver.complete(1)
        driver.answer_cancels()
        driver.submit("full", num_prompt=5, max_tokens=5, tenant=tenant)
        assert isinstance(error := driver.refusals["full"], QuotaExceeded)
        assert error.retry_after_s == pytest.approx(3.0)  # 11 of 20 are used
        driver.assert_empty()


def test_a_request_beyond_a_whole_minute_is_refused_for_good_with_both_numbers() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit(num_prompt=90, max_tokens=11, tenant=Tenant("a", tokens_per_minute=100))
    error = driver.refusals["r"]
    assert isinstance(error, InvalidRequest)
    assert "101" in error.message
    assert "100 tokens per minute" in error.message


def test_a_changed_quota_holds_from_the_next_request_on() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit("r1", tenant=Tenant("a", requests_per_minute=1))
    driver.submit("r2", tenant=Tenant("a", requests_per_minute=1))
    driver.submit("r3", tenant=Tenant("a", requests_per_minute=5))
    driver.submit("r4", tenant=Tenant("a"))
    assert list(driver.refusals) == ["r2"]
    assert driver.count(CoordinatorMetric.REFUSED, "quota_exceeded") == 1


# ── whose turn it is ────────────────────────────────────────────────────────────────────────────────────────


def test_the_lowest_priority_of_a_tenant_goes_first_and_equals_in_order_of_arrival() -> None:
    driver = one_at_a_time()
    for request_id, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        driver.submit(request_id, priority=priority)
    assert order(driver) == ["c", "a", "d", "b"]


def test_a_priority_is_no_advantage_over_other_tenants() -> None:
    driver = one_at_a_time()
    for i in range(2):
        driver.submit(f"a{i}", tenant=Tenant("a"), priority=-100)
        driver.submit(f"b{i}", tenant=Tenant("b"), priority=100)
    assert order(driver) == ["a0", "b0", "a1", "b1"]


def test_priorities_delay_nobody_beyond_half_the_longest_wait() -> None:
    driver = one_at_a_time(max_wait_s=20.0)
    driver.submit("patient", priority=9)
    for _ in range(3):
        driver.heartbeat("P", "D")
        driver.advance(3.5)
    driver.submit("urgent", priority=0)
    assert order(driver) == ["patient", "urgent"]


def test_resumed_requests_go_before_new_ones_whatever_their_priority_and_tenant() -> None:
    driver = one_at_a_time()
    driver.submit("new", tenant=Tenant("other"), priority=-5)
    driver.submit("less served", tenant=Tenant("newcomer"), num_prompt=1)
    driver.dropped("P", "transfer", request_id="first")
    driver.answer_cancels()
    assert driver.state("first") is RequestState.PREFILLING
    assert driver.state("new") is RequestState.QUEUED
    assert driver.state("less served") is RequestState.QUEUED
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


# ── who may fill the queue ──────────────────────────────────────────────────────────────────────────────────


def test_a_tenant_that_is_alone_may_fill_the_queue_and_then_its_share() -> None:
    driver = CoreDriver(max_in_flight=1, max_queue_requests=8)
    driver.pair()
    small, big = Tenant("small"), Tenant("big", weight=3.0)
    for i in range(9):
        driver.submit(f"big-{i}", tenant=big)
    assert not driver.refusals
    driver.submit("small-0", tenant=small)
    assert isinstance(driver.refusals["small-0"], QueueFull)  # full, and now both have asked
    for i in range(2):
        driver.token("P", 0, FinishReason.STOP, request_id=f"big-{i}")
        driver.answer_cancels()
    driver.submit("big-9", tenant=big)
    assert "6 requests of yours wait already and at most 6 may" in driver.refusals["big-9"].message
    for i in range(1, 4):
        driver.submit(f"small-{i}", tenant=small)
    assert "small-1" not in driver.refusals
    assert "small-2" not in driver.refusals
    assert isinstance(driver.refusals["small-3"], QueueFull)
    driver.do(Shutdown())
    driver.answer_cancels()
    driver.assert_empty()


def test_a_share_of_the_prompt_tokens_too_and_after_a_minute_all_of_it_again() -> None:
    driver = one_at_a_time(max_queue_tokens=100, max_wait_s=1000.0)
    driver.submit("b", num_prompt=1, tenant=Tenant("b"))
    driver.submit("a0", num_prompt=30, tenant=Tenant("a"))
    driver.submit("a1", num_prompt=10, tenant=Tenant("a"))
    assert "30 prompt tokens of yours wait already, this request has 10, and at most 33" in (
        driver.refusals["a1"].message
    )
    driver.now += 61.0
    driver.submit("a2", num_prompt=60, tenant=Tenant("a"))
    assert "a2" not in driver.refusals
    driver.do(Shutdown())


# ── cancelling ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tenant_cancels_its_own_requests_and_does_not_learn_of_others() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit(tenant=Tenant("a"))
    driver.cancel("r", "b")
    assert isinstance(driver.refusals.pop("r"), UnknownRequest)
    assert driver.finish() is None
    driver.cancel("nobody's", "a")
    assert isinstance(driver.refusals.pop("nobody's"), UnknownRequest)
    driver.cancel("r", "a")
    assert driver.finish() is FinishReason.CANCELLED
    driver.cancel("r", "a")  # again, while the workers let go
    driver.answer_cancels()
    driver.cancel("r", "a")  # and afterwards
    assert not driver.refusals
    assert driver.state() is RequestState.CANCELLED
    driver.assert_empty()
