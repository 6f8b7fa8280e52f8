"""What is lost is started again within bounds, and what cannot be is said at once."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.config import Role
from twinpool.coordinator.events import FromWorker, PoolGivenUp
from twinpool.coordinator.tally import MAX_GONE_NAMES, OTHERS, Tally
from twinpool.errors import InvariantViolation, NoWorker, RequestFailed
from twinpool.messages import Cancel, Dropped, Prefill
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestKey, RequestState

# ── the retry budget ────────────────────────────────────────────────────────────────────────────────────────


def test_a_used_up_retry_budget_ends_lost_requests_with_words_that_say_so() -> None:
    driver = CoreDriver(retry_budget=1)
    driver.pair()
    for i in range(3):
        driver.submit(f"r{i}")
    for i in range(3):
        driver.dropped("P", "transfer", request_id=f"r{i}")
    driver.answer_cancels()
    ended = [f"r{i}" for i in range(3) if driver.finish(f"r{i}") is FinishReason.ERROR]
    assert len(ended) == 2
    for request_id in ended:
        error = driver.outputs[request_id][-1].error
        assert isinstance(error, RequestFailed)
        assert "retry budget (1) is used up" in error.message
    assert driver.count(CoordinatorMetric.RETRIES_REFUSED) == 2


def test_admitted_requests_fill_the_budget_again_up_to_its_size() -> None:
    driver = CoreDriver(retry_budget=1)
    driver.pair()
    for i in range(20):
        driver.submit(f"r{i}")
        driver.token("P", 0, FinishReason.STOP, request_id=f"r{i}")
        driver.answer_cancels()
    assert driver.core.retries.left == 1
    driver.submit()
    driver.dropped("P", "transfer")
    assert driver.core.retries.left == 0
    assert driver.finish() is None
    for i in range(20, 22):
        driver.submit(f"r{i}")
    assert driver.core.retries.left == 1


def test_preemptions_are_no_retries() -> None:
    driver = CoreDriver(retry_budget=0)
    driver.pair()
    driver.submit()
    driver.token("P", 0)
    driver.handoff()
    driver.dropped("D", "preempted")
    driver.answer_cancels()
    assert driver.finish() is None
    driver.heartbeat("P", "D")
    driver.advance(1.0)
    assert driver.state() is RequestState.PREFILLING


def test_the_default_budget_resumes_the_full_batch_of_a_worker_that_dies_first_thing() -> None:
    driver = CoreDriver()
    driver.join("P", Role.PREFILL, max_num_seqs=64)
    driver.join("D", Role.DECODE, max_num_seqs=64)
    driver.link("P", "D")
    for i in range(128):
        driver.submit(f"r{i}", num_prompt=1, max_tokens=2)
    driver.lose("D")
    assert not [r for r in driver.outputs if driver.finish(r) is not None]


# ── pools that nobody starts again ──────────────────────────────────────────────────────────────────────────


def test_what_waits_for_a_pool_that_is_given_up_ends_at_once() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit("lost")
    driver.lose("D")
    assert driver.finish("lost") is None  # it may come back
    driver.do(PoolGivenUp(Role.DECODE, "decode-0 is not started again (exit status 3)"))
    assert isinstance(error := driver.outputs["lost"][-1].error, NoWorker)
    assert "decode pool has no worker left" in error.message
    assert "exit status 3" in error.message
    driver.answer_cancels()
    driver.assert_empty()
    driver.submit("later")
    assert isinstance(driver.refusals["later"], NoWorker)


def test_a_request_that_loses_the_last_worker_of_a_given_up_pool_ends_then() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.do(PoolGivenUp(Role.PREFILL, "prefill-1 is not started again"))
    driver.submit()  # there is another one, of another host
    driver.token("P", 0)
    driver.handoff()
    driver.lose("P")
    driver.token("D", 1)
    assert driver.finish() is None  # decode has all it needs
    driver.lose("D")
    assert isinstance(driver.outputs["r"][-1].error, NoWorker)
    driver.assert_empty()


# ── bugs of ours ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_broken_rule_ends_its_request_with_an_error_and_releases_what_it_holds() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit("broken")
    driver.submit("sound")
    driver.core._custody.requests["broken"].state = RequestState.QUEUED  # as a bug would
    with pytest.raises(InvariantViolation, match="broken"):
        driver.core.handle(FromWorker("P", "P-a", Dropped(RequestKey("broken", 1), "transfer")), driver.now)
    driver.advance(0.05)
    error = driver.outputs["broken"][-1].error
    assert isinstance(error, RequestFailed)
    assert "bug in Twinpool" in error.message
    assert {s.message.key.request_id for s in driver.sent if isinstance(s.message, Cancel)} == {"broken"}
    assert len([m for m in driver.sent_to("P") if isinstance(m, Prefill)]) == 2
    driver.token("P", 0, FinishReason.STOP, request_id="sound")
    driver.answer_cancels()
    assert driver.state("broken") is RequestState.FAILED
    assert driver.state("sound") is RequestState.COMPLETED
    driver.assert_empty()


# ── counters of workers that are gone ───────────────────────────────────────────────────────────────────────


def test_counters_of_gone_workers_are_kept_in_bounded_room_and_their_sum_is_exact() -> None:
    tally = Tally()
    for i in range(3 * MAX_GONE_NAMES):
        tally.retire_worker(f"w{i}", (Role.PREFILL, Role.DECODE)[i % 2], {"steps_total": 1.0})
        tally.retire_worker("steady", Role.PREFILL, {"steps_total": 1.0})
    assert len(tally.gone_workers) <= MAX_GONE_NAMES + 2
    assert tally.gone_workers["steady", Role.PREFILL]["steps_total"] == 3 * MAX_GONE_NAMES
    assert (OTHERS, Role.DECODE) in tally.gone_workers
    assert sum(counts["steps_total"] for counts in tally.gone_workers.values()) == 6 * MAX_GONE_NAMES
