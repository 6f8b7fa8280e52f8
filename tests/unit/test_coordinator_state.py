"""Requests through the coordinator's core, step by step; every test ends with nothing held."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.config import Role
from twinpool.errors import QueueFull, RequestFailed
from twinpool.messages import Cancel, Generate, Prefill, PushTo, Reserve, StepTokens, Token
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestKey, RequestState


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver()
    driver.pair()
    return driver


def test_a_request_goes_through_both_pools(driver: CoreDriver) -> None:
    # 1: it arrives and goes to both workers at once
    driver.submit(max_tokens=3)
    (prefill,), (reserve,) = driver.sent_to("P"), driver.sent_to("D")
    assert isinstance(prefill, Prefill)
    assert isinstance(reserve, Reserve)
    assert prefill.decode_worker == "D"
    assert (reserve.prefill_worker, reserve.prefill_incarnation) == ("P", "P-a")
    assert prefill.job == reserve.job
    assert (prefill.job.key, prefill.job.num_emitted) == (RequestKey("r", 1), 0)
    assert driver.state() is RequestState.PREFILLING
    # 2: decode grants room, prefill hears of it
    driver.grant()
    assert driver.sent_to("P")[1] == PushTo(RequestKey("r", 1), "D", "D-a", 7, (3,), 0)
    # 3: the first token streams while the blocks still travel
    driver.report()
    driver.token("P", 0)
    assert driver.state() is RequestState.TRANSFERRING
    assert driver.tokens() == [1000]
    # 4: decode has verified the blocks; prefill holds nothing any more
    driver.handoff()
    assert driver.state() is RequestState.DECODING
    worker = driver.core.registry.get("P")
    assert worker is not None
    assert not worker.legs
    # 5: decode's tokens, the last one ends it
    driver.token("D", 1)
    driver.token("D", 2, FinishReason.LENGTH)
    assert driver.tokens() == [1000, 1001, 1002]
    assert driver.finish() is FinishReason.LENGTH
    assert driver.state() is RequestState.COMPLETED
    assert not [m for m in (*driver.sent_to("P"), *driver.sent_to("D")) if isinstance(m, Cancel)]
    driver.assert_empty()


def test_a_colocated_worker_does_it_alone() -> None:
    driver = CoreDriver()
    driver.join("K", Role.COLOCATED)
    driver.sent.clear()
    driver.submit(max_tokens=2)
    (generate,) = driver.sent_to("K")
    assert isinstance(generate, Generate)
    driver.report(worker_id="K")
    driver.token("K", 0)
    assert driver.state() is RequestState.DECODING
    driver.token("K", 1, FinishReason.LENGTH)
    assert driver.state() is RequestState.COMPLETED
    driver.assert_empty()


def test_a_request_that_ends_with_its_first_token_is_not_handed_off(driver: CoreDriver) -> None:
    driver.submit(max_tokens=2)
    driver.grant()
    driver.token("P", 0, FinishReason.STOP)
    assert driver.finish() is FinishReason.STOP
    assert driver.sent_to("D")[1:] == [Cancel(RequestKey("r", 1))]
    # The client has its answer, but decode still holds the reservation.
    assert driver.state() is RequestState.DRAINING
    driver.answer_cancels()
    assert driver.state() is RequestState.COMPLETED
    driver.assert_empty()


def test_decode_hears_nothing_of_an_answer_of_one_token(driver: CoreDriver) -> None:
    driver.submit(max_tokens=1)
    assert driver.sent_to("D") == []
    driver.token("P", 0, FinishReason.LENGTH)
    assert driver.state() is RequestState.COMPLETED
    driver.assert_empty()


def test_tokens_of_decode_that_overtake_the_first_one_wait_for_it(driver: CoreDriver) -> None:
    driver.submit(max_tokens=3)
    driver.grant()
    driver.handoff()
    driver.token("D", 1)
    driver.token("D", 2, FinishReason.LENGTH)
    assert driver.tokens() == []
    assert driver.state() is RequestState.PREFILLING
    driver.token("P", 0)
    assert driver.tokens() == [1000, 1001, 1002]
    assert len(driver.outputs["r"]) == 1
    assert driver.state() is RequestState.COMPLETED
    driver.assert_empty()


def test_a_token_that_comes_twice_is_counted_and_delivered_once(driver: CoreDriver) -> None:
    driver.submit(max_tokens=3)
    driver.token("P", 0)
    driver.handoff()
    driver.token("D", 1)
    driver.token("D", 1)
    driver.token("D", 2, FinishReason.LENGTH)
    assert driver.tokens() == [1000, 1001, 1002]
    assert driver.count(CoordinatorMetric.DUPLICATE_TOKENS) == 1
    assert any(note.is_fault for note in driver.notes)
    driver.assert_empty()


def test_a_gap_in_a_workers_tokens_loses_the_attempt_not_the_stream(driver: CoreDriver) -> None:
    driver.submit(max_tokens=4)
    driver.token("P", 0)
    driver.handoff()
    driver.token("D", 2)
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1
    driver.answer_cancels()
    driver.token("P", 1, attempt=2)
    driver.handoff(attempt=2)
    driver.token("D", 2, attempt=2)
    driver.token("D", 3, FinishReason.LENGTH, attempt=2)
    assert driver.tokens() == [1000, 1001, 1002, 1003]
    driver.assert_empty()


@pytest.mark.parametrize("reason", ["preempted", "no_room"])
def test_lack_of_room_resumes_with_the_tokens_so_far_in_the_prompt(driver: CoreDriver, reason: str) -> None:
    driver.submit(max_tokens=5)
    driver.token("P", 0)
    driver.handoff()
    driver.token("D", 1)
    driver.sent.clear()
    driver.dropped("D", reason)
    # A worker without room is left alone for a moment.
    assert driver.state() is RequestState.QUEUED
    driver.advance(0.2)
    assert driver.state() is RequestState.PREFILLING
    (prefill,) = driver.sent_to("P")
    assert isinstance(prefill, Prefill)
    job = prefill.job
    assert (job.attempt, job.num_emitted, job.num_prompt) == (2, 2, 10)
    assert job.token_ids[-2:] == (1000, 1001)
    assert job.sampling.max_tokens == 5
    # Words of the first attempt mean nothing any more.
    driver.token("D", 2, attempt=1)
    assert driver.tokens() == [1000, 1001]
    driver.token("P", 2, attempt=2)
    driver.handoff(attempt=2)
    driver.token("D", 3, attempt=2)
    driver.token("D", 4, FinishReason.LENGTH, attempt=2)
    assert driver.tokens() == [1000, 1001, 1002, 1003, 1004]
    driver.assert_empty()


@pytest.mark.parametrize("reason", ["preempted", "no_room"])
def test_lack_of_room_uses_up_no_attempt_but_losses_do(reason: str) -> None:
    driver = CoreDriver(max_attempts=2)
    driver.pair()
    driver.submit(max_tokens=40)
    for attempt in range(1, 9):
        driver.token("P", attempt - 1, attempt=attempt)
        driver.handoff(attempt=attempt)
        driver.dropped("D", reason, attempt=attempt)
        driver.advance(0.2)
        driver.heartbeat("P", "D")
    driver.dropped("P", "transfer", attempt=9)
    driver.answer_cancels()
    assert driver.finish() is None
    driver.dropped("P", "transfer", attempt=10)
    assert driver.finish() is FinishReason.ERROR
    error = driver.outputs["r"][-1].error
    assert isinstance(error, RequestFailed)
    assert "lost 2 times" in error.message
    driver.answer_cancels()
    assert driver.state() is RequestState.FAILED
    driver.assert_empty()


def test_preemptions_without_progress_end_when_the_longest_wait_is_over() -> None:
    driver = CoreDriver(max_wait_s=2.0)
    driver.pair()
    driver.submit(max_tokens=4)
    driver.token("P", 0)
    for attempt in range(1, 100):
        driver.dropped("D", "preempted", attempt=attempt)
        driver.answer_cancels()
        driver.heartbeat("P", "D")
        driver.advance(0.2)
        if driver.finish() is not None:
            break
    assert 9 <= attempt <= 12
    assert driver.finish() is FinishReason.TIMEOUT
    assert isinstance(driver.outputs["r"][-1].error, QueueFull)
    driver.answer_cancels()
    driver.assert_empty()


def test_a_preemption_that_prefill_reports_first_as_a_lost_transfer_uses_up_no_attempt() -> None:
    driver = CoreDriver(max_attempts=2)
    driver.pair()
    driver.submit(max_tokens=4)
    for attempt in (1, 2, 3):
        driver.dropped("P", "transfer", attempt=attempt)  # decode took its grant back
        driver.dropped("D", "preempted", attempt=attempt)  # and says so over its own connection
        driver.sent.clear()
        driver.heartbeat("P", "D")
        driver.advance(0.2)
    assert driver.finish() is None
    driver.abandon()
    driver.answer_cancels()
    driver.assert_empty()


def test_a_worker_lost_with_two_attempts_of_a_request_ends_it_once() -> None:
    driver = CoreDriver(max_attempts=2)
    driver.pair()
    driver.submit()
    driver.dropped("D", "transfer")  # P still holds the first attempt when it gets the second
    assert len(driver.sent_to("P")) == 3
    driver.dropped("D", "transfer", attempt=2)
    assert driver.finish() is FinishReason.ERROR
    assert driver.state() is RequestState.DRAINING
    driver.lose("P")
    assert driver.state() is RequestState.FAILED
    assert driver.count(CoordinatorMetric.REQUESTS, "failed") == 1
    driver.assert_empty()


def test_early_tokens_of_a_lost_attempt_are_forgotten(driver: CoreDriver) -> None:
    driver.submit(max_tokens=3)
    driver.handoff()
    driver.token("D", 1)
    driver.token("D", 1)
    assert driver.count(CoordinatorMetric.DUPLICATE_TOKENS) == 1
    driver.lose("P")
    driver.answer_cancels()
    driver.join("P", Role.PREFILL, "b")
    driver.link("P", "D")
    driver.token("P", 0, attempt=2)
    assert driver.tokens() == [1000]
    driver.handoff(attempt=2)
    driver.token("D", 1, attempt=2)
    driver.token("D", 2, FinishReason.LENGTH, attempt=2)
    assert driver.tokens() == [1000, 1001, 1002]
    driver.assert_empty()


def test_a_gap_among_early_tokens_is_a_fault(driver: CoreDriver) -> None:
    driver.submit(max_tokens=9)
    driver.handoff()
    driver.token("D", 2)
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1
    driver.abandon()
    driver.answer_cancels()
    driver.assert_empty()


def test_a_prefill_worker_lost_while_its_blocks_travel_is_decodes_word(driver: CoreDriver) -> None:
    driver.submit(max_tokens=3)
    driver.token("P", 0)
    driver.lose("P")
    # Decode may have everything already, and says so:
    assert driver.state() is RequestState.TRANSFERRING
    driver.handoff()
    driver.token("D", 1)
    driver.token("D", 2, FinishReason.LENGTH)
    assert driver.tokens() == [1000, 1001, 1002]
    assert driver.count(CoordinatorMetric.ATTEMPTS_LOST, "worker lost") == 0
    driver.assert_empty()


def test_or_decode_has_lost_the_transfer_and_the_request_starts_again(driver: CoreDriver) -> None:
    driver.submit(max_tokens=2)
    driver.token("P", 0)
    driver.lose("P")
    driver.dropped("D", "transfer")
    assert driver.state() is RequestState.QUEUED
    driver.join("P", Role.PREFILL, "b")
    driver.link("P", "D")
    assert driver.state() is RequestState.PREFILLING
    driver.token("P", 1, FinishReason.LENGTH, attempt=2)
    driver.answer_cancels()
    assert driver.tokens() == [1000, 1001]
    driver.assert_empty()


def test_resumed_requests_go_first_and_keep_their_order() -> None:
    driver = CoreDriver(max_in_flight=2)
    driver.pair()
    for request_id in ("a", "b", "c"):
        driver.submit(request_id)
        driver.now += 1
    driver.lose("D")
    assert [r.request_id for r in driver.core.queue] == ["a", "b", "c"]
    for request_id in ("a", "b", "c"):
        driver.abandon(request_id)
    driver.answer_cancels()
    driver.assert_empty()


def test_one_message_carries_tokens_of_many_requests(driver: CoreDriver) -> None:
    ids = [f"r{i}" for i in range(4)]
    for request_id in ids:
        driver.submit(request_id, max_tokens=2)
    driver.say("P", StepTokens(tuple(Token(RequestKey(r, 1), 0, 5) for r in ids)))
    for request_id in ids:
        driver.handoff(request_id=request_id)
    driver.say("D", StepTokens(tuple(Token(RequestKey(r, 1), 1, 6, FinishReason.LENGTH) for r in ids)))
    assert all(driver.tokens(r) == [5, 6] for r in ids)
    assert driver.count(CoordinatorMetric.REQUESTS, "completed") == 4
    driver.assert_empty()
