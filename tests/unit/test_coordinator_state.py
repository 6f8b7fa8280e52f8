"""Requests through the coordinator's core, step by step; every test ends with nothing held."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.config import Role
from twinpool.coordinator.events import Delivered, Drain, Shutdown
from twinpool.errors import ContextLengthExceeded, InvalidRequest, NoWorker, QueueFull, RequestFailed
from twinpool.messages import Cancel, Generate, Left, Prefill, PushTo, Reserve, StepTokens, Stop, Token
from twinpool.metrics import CoordinatorMetric, Timing
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
    driver.submit(max_tokens=1)
    driver.grant()
    driver.token("P", 0, FinishReason.LENGTH)
    assert driver.finish() is FinishReason.LENGTH
    assert driver.sent_to("D")[1:] == [Cancel(RequestKey("r", 1))]
    # The client has its answer, but decode still holds the reservation.
    assert driver.state() is RequestState.DRAINING
    driver.answer_cancels()
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


def test_preemption_resumes_with_the_tokens_so_far_in_the_prompt(driver: CoreDriver) -> None:
    driver.submit(max_tokens=5)
    driver.token("P", 0)
    driver.handoff()
    driver.token("D", 1)
    driver.sent.clear()
    driver.dropped("D", "preempted")
    # A worker that had to preempt is left alone for a moment.
    assert driver.state() is RequestState.QUEUED
    driver.advance(0.2)
    assert driver.state() is RequestState.PREFILLING
    (prefill,) = driver.sent_to("P")
    assert isinstance(prefill, Prefill)
    job = prefill.job
    assert (job.attempt, job.num_emitted, job.num_prompt) == (2, 2, 10)
    assert job.token_ids[-2:] == (1000, 1001)
    assert job.max_total_tokens == 15
    # Words of the first attempt mean nothing any more.
    driver.token("D", 2, attempt=1)
    assert driver.tokens() == [1000, 1001]
    driver.token("P", 2, attempt=2)
    driver.handoff(attempt=2)
    driver.token("D", 3, attempt=2)
    driver.token("D", 4, FinishReason.LENGTH, attempt=2)
    assert driver.tokens() == [1000, 1001, 1002, 1003, 1004]
    driver.assert_empty()


def test_preemptions_use_up_no_attempt_but_losses_do() -> None:
    driver = CoreDriver(max_attempts=2)
    driver.pair()
    driver.submit(max_tokens=40)
    for attempt in range(1, 9):
        driver.token("P", attempt - 1, attempt=attempt)
        driver.handoff(attempt=attempt)
        driver.dropped("D", "preempted", attempt=attempt)
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


def test_by_default_twice_the_decode_slots_are_in_flight() -> None:
    driver = CoreDriver()
    driver.pair()
    for i in range(10):
        driver.submit(f"r{i}")
    states = [driver.state(f"r{i}") for i in range(10)]
    assert states.count(RequestState.PREFILLING) == 8
    assert states.count(RequestState.QUEUED) == 2
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
    assert "predicted wait is 6 s and at most 5 s" in error.message
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


def test_an_id_in_use_is_refused_and_the_other_request_goes_on(driver: CoreDriver) -> None:
    driver.submit(max_tokens=1)
    driver.submit(max_tokens=1)
    assert isinstance(driver.refusals["r"], InvalidRequest)
    driver.token("P", 0, FinishReason.LENGTH)
    driver.answer_cancels()
    assert driver.tokens() == [1000]
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


def test_shutdown_ends_every_stream_with_an_error(driver: CoreDriver) -> None:
    driver.submit()
    driver.do(Shutdown())
    assert driver.finish() is FinishReason.TIMEOUT
    driver.answer_cancels()
    assert driver.state() is RequestState.TIMED_OUT
    driver.assert_empty()


def test_the_stages_add_up_to_what_the_client_saw(driver: CoreDriver) -> None:
    driver.now = 10.0
    driver.submit(max_tokens=3)
    driver.now = 10.1234567
    driver.report()
    driver.token("P", 0)
    driver.now = 10.2
    driver.do(Delivered("r"))
    driver.handoff()
    driver.now = 10.3
    driver.token("D", 1)
    driver.now = 10.5
    driver.token("D", 2, FinishReason.LENGTH)
    driver.now = 99.0
    timeline = driver.core.timeline("r")
    assert timeline is not None
    stages = timeline.stages_us(driver.now)
    assert stages == {
        "validate": 1000, "tokenize": 2000, "queue": 0, "prefill": 123457, "transfer": 76543, "decode": 300000,
        "deliver": 76543,
    }  # fmt: skip
    assert sum(stages[s] for s in ("validate", "tokenize", "queue", "prefill", "deliver")) == timeline.ttft_us
    assert timeline.ttft_us == 203000
    assert sum(us for name, us in stages.items() if name != "deliver") == 503000
    values = timeline.to_json(driver.now)
    assert values["e2e_s"] == 0.503
    assert values["transfer"]["gb_per_s"] == pytest.approx(4096 / 0.001 / 1e9)
    assert values["attempts"][0]["route"][0]["worker"] == "P"
    assert sum(driver.core.tally.timings[Timing.TTFT].counts) == 1
    driver.assert_empty()


def test_the_stages_add_up_over_a_lost_first_attempt_too(driver: CoreDriver) -> None:
    driver.now = 5.0
    driver.submit(max_tokens=2)
    driver.now = 6.0
    driver.dropped("D", "transfer")
    driver.answer_cancels()
    driver.now = 7.0
    driver.token("P", 0, attempt=2)
    driver.do(Delivered("r"))
    driver.dropped("P", "transfer", attempt=2)
    driver.answer_cancels()
    driver.now = 9.0
    driver.token("P", 1, FinishReason.LENGTH, attempt=3)
    driver.answer_cancels()
    timeline = driver.core.timeline("r")
    assert timeline is not None
    stages = timeline.stages_us(driver.now)
    assert (stages["prefill"], stages["resume"]) == (2_000_000, 2_000_000)
    assert sum(stages.values()) - stages["deliver"] == 4_003_000
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
