"""Where the coordinator sends requests when workers are hybrids: what it predicts, records, counts, and never does."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.coordinator_core import LAYOUT, CoreDriver, stats

from twinpool.config import Role
from twinpool.coordinator.events import PoolGivenUp
from twinpool.coordinator.timeline import Attempt, Exclusion, Way
from twinpool.messages import Generate, Heartbeat, Peers, Prefill, PrefillReport, Reserve
from twinpool.metrics import CoordinatorMetric, Timing
from twinpool.request import FinishReason, RequestKey, RequestState
from twinpool.step_pace import StepPace

PACE = StepPace(base_s=0.010, sequence_s=0.001, prompt_token_s=0.001)
BUDGET_S = 0.2


def hybrids(pace: StepPace | None = PACE, **changes: object) -> CoreDriver:
    """One prefill and one decode worker, both hybrids, linked; each has said how long its steps take."""
    driver = CoreDriver()
    values: dict[str, object] = {"itl_budget_s": BUDGET_S, "max_num_seqs": 16, "num_blocks": 512} | changes
    driver.join("P", Role.PREFILL, **values)
    driver.join("D", Role.DECODE, **values)
    driver.link("P", "D")
    for worker_id in ("P", "D"):
        driver.say(worker_id, Heartbeat(msgspec.structs.replace(stats(), pace=pace)))
    driver.sent.clear()
    return driver


def attempt_of(driver: CoreDriver, request_id: str) -> Attempt:
    timeline = driver.core.timeline(request_id)
    assert timeline is not None
    return timeline.attempts[-1]


def ways(driver: CoreDriver, count: int) -> list[Way | None]:
    return [attempt_of(driver, f"r{i}").way for i in range(count)]


def test_where_all_are_idle_a_request_is_split() -> None:
    driver = hybrids()
    driver.submit("r0", num_prompt=100)
    assert [type(m) for m in driver.sent_to("P")] == [Prefill]
    assert [type(m) for m in driver.sent_to("D")] == [Reserve]


def test_an_idle_decode_worker_takes_a_prompt_that_would_wait_for_another() -> None:
    driver = hybrids()
    driver.submit("r0", num_prompt=200, first=1000)
    driver.submit("r1", num_prompt=100, first=3000)
    assert ways(driver, 2) == [Way.SPLIT, Way.LOCAL_PREFILL]
    assert Generate in [type(m) for m in driver.sent_to("D")]
    won, *others = attempt_of(driver, "r1").predictions
    # 100 tokens beside one sequence to come, in two chunks of at most 89; and behind the 200 of r0.
    assert won.first_token_s == pytest.approx(2 * 0.011 + 0.100)
    split = next(p for p in others if p.way is Way.SPLIT)
    assert split.first_token_s == pytest.approx(2 * 0.010 + 0.300)
    assert driver.core.tally.counts(CoordinatorMetric.HYBRID_CHOICES) == {Way.SPLIT: 1, Way.LOCAL_PREFILL: 1}


def test_a_whole_job_on_a_decode_worker_counts_its_prompt_once_and_moves_nothing() -> None:
    driver = hybrids()
    driver.submit("r0", num_prompt=200, first=1000)
    driver.submit("r1", num_prompt=100, first=3000, max_tokens=2)
    assert attempt_of(driver, "r1").way is Way.LOCAL_PREFILL
    driver.report(worker_id="D", request_id="r1", num_cached=32, num_computed=68)
    driver.token("D", 0, request_id="r1")
    driver.token("D", 1, FinishReason.LENGTH, request_id="r1")
    timeline = driver.core.timeline("r1")
    assert timeline is not None
    told = timeline.facts(driver.now, LAYOUT.block_size)
    assert (told.num_cached_tokens, told.num_computed_tokens) == (32, 68)
    assert (told.num_transferred_tokens, told.num_resumed) == (0, 0)


def test_a_prompt_that_is_told_of_is_expected_to_be_computed_whole() -> None:
    """What another request has left in the workers' caches makes no prediction of it smaller."""
    driver = hybrids()
    driver.submit("r0", num_prompt=100, max_tokens=1, first=1000)
    driver.token("P", 0, FinishReason.LENGTH, request_id="r0")
    for request_id, asked, pending in (("plain", {}, 36), ("told", {"prompt_logprobs": 0}, 100)):
        driver.submit(request_id, num_prompt=100, first=1000, sampling=asked)
        worker = driver.core.registry.get(attempt_of(driver, request_id).prefill_worker)
        assert worker is not None
        assert worker.legs[RequestKey(request_id, 1)].pending_tokens == pending


def test_an_idle_prefill_worker_keeps_streams_when_decode_has_many() -> None:
    driver = hybrids()
    for i in range(12):
        driver.submit(f"r{i}", num_prompt=20, max_tokens=60, first=1000 * i)
        driver.advance(0.01)
        worker = attempt_of(driver, f"r{i}").prefill_worker
        driver.say(worker, PrefillReport(RequestKey(f"r{i}", 1), 0.0, 0.02, 0, 20, 1))
    assert set(ways(driver, 12)) == {Way.SPLIT, Way.LOCAL_DECODE}
    counts = [ways(driver, 12).count(way) for way in (Way.SPLIT, Way.LOCAL_DECODE)]
    assert counts[0] > counts[1] > 0, "a stream is worth moving only where steps are clearly shorter"


def test_without_evidence_requests_are_split() -> None:
    driver = hybrids(pace=None)
    for i in range(4):
        driver.submit(f"r{i}", num_prompt=100, first=1000 * i)
    assert set(ways(driver, 2)) == {Way.SPLIT}
    assert driver.core.tally.count(CoordinatorMetric.HYBRID_CHOICES, Way.LOCAL_PREFILL) == 0


def test_where_no_worker_is_a_hybrid_nothing_is_compared() -> None:
    driver = hybrids(itl_budget_s=None)
    driver.submit("r0", num_prompt=100)
    assert attempt_of(driver, "r0").way is None
    assert driver.core.tally.counts(CoordinatorMetric.HYBRID_CHOICES) == {}
    timeline = driver.core.timeline("r0")
    assert timeline is not None
    assert timeline.to_json(driver.now)["attempts"][0]["hybrid"] is None


def test_a_decode_worker_whose_streams_fill_the_budget_gets_no_prompt() -> None:
    slow = StepPace(base_s=0.090, sequence_s=0.001, prompt_token_s=0.001)
    driver = hybrids(pace=slow)
    for i in range(3):
        driver.submit(f"r{i}", num_prompt=200, first=1000 * i)
    assert Way.LOCAL_PREFILL not in ways(driver, 2)


@pytest.mark.parametrize("lost", ["P", "D"])
def test_without_one_pool_the_hybrid_of_the_other_runs_requests_whole(lost: str) -> None:
    driver = hybrids()
    driver.lose(lost)
    driver.do(PoolGivenUp(Role.PREFILL if lost == "P" else Role.DECODE, "it is broken"))
    driver.submit("r0", num_prompt=100)
    assert driver.refusals == {}
    (left,) = {"P", "D"} - {lost}
    assert [type(m) for m in driver.sent_to(left)] == [Peers, Generate]
    driver.token(left, 0, FinishReason.STOP, request_id="r0")
    assert driver.finish("r0") is FinishReason.STOP
    driver.answer_cancels()
    driver.assert_empty()


@pytest.mark.parametrize("base_s", [0.090, None])
def test_without_prefill_pool_a_hybrid_with_no_room_in_its_budget_or_of_unknown_pace_gets_no_request(
    base_s: float | None,
) -> None:
    driver = hybrids(None if base_s is None else replace(PACE, base_s=base_s))
    driver.lose("P")
    driver.submit("r0", num_prompt=100)
    assert "the prefill pool is empty" in str(driver.refusals["r0"])


def exclusions(driver: CoreDriver, request_id: str) -> dict[str, Exclusion]:
    return {excluded.worker_id: excluded.reason for excluded in attempt_of(driver, request_id).excluded}


def test_a_timeline_says_why_each_hybrid_did_not_get_the_request_whole() -> None:
    driver = hybrids()
    driver.submit("r0", num_prompt=200, first=1000)
    driver.submit("r1", num_prompt=100, first=3000)
    assert exclusions(driver, "r0") == {"P": Exclusion.LITTLE_GAIN, "D": Exclusion.LITTLE_GAIN}
    assert exclusions(driver, "r1") == {"P": Exclusion.LITTLE_GAIN}
    told = attempt_of(driver, "r1").to_json()["hybrid"]["excluded"]
    assert told == [{"way": "local_decode", "worker": "P", "reason": "not clearly sooner"}]
    slow = hybrids(replace(PACE, base_s=0.090))
    slow.submit("r0", num_prompt=100)
    assert exclusions(slow, "r0") == {"P": Exclusion.BUDGET, "D": Exclusion.BUDGET}
    unknown = hybrids(pace=None)
    unknown.submit("r0", num_prompt=100)
    assert exclusions(unknown, "r0") == {"P": Exclusion.UNKNOWN_SPLIT, "D": Exclusion.UNKNOWN_SPLIT}


@pytest.mark.parametrize(
    ("base_s", "words"),
    [
        (
            0.010,
            "hybrid D: within --itl-budget 200 a step takes 90 prompt tokens without streams and 89 beside one",
        ),
        (0.090, "hybrid D cannot help the other pool: within --itl-budget 200 a step takes 0 prompt tokens"),
    ],
)
def test_a_hybrid_s_first_pace_says_once_in_the_log_what_it_can_do(base_s: float, words: str) -> None:
    driver = hybrids(replace(PACE, base_s=base_s))
    driver.say("D", Heartbeat(msgspec.structs.replace(stats(), pace=PACE)))
    (told,) = [note.text for note in driver.notes if note.text.startswith("hybrid D")]
    assert told.startswith(words)


def test_a_decode_worker_that_holds_the_prefix_wins() -> None:
    driver = hybrids()
    driver.submit("r0", num_prompt=200)
    driver.grant(request_id="r0")
    driver.token("P", 0, FinishReason.STOP, request_id="r0")
    driver.answer_cancels()
    driver.submit("r1", num_prompt=200, first=5000)
    driver.submit("r2", num_prompt=200)
    assert ways(driver, 3)[2] is Way.LOCAL_PREFILL
    won = attempt_of(driver, "r2").predictions[0]
    assert won.first_token_s < 0.05, "8 of 200 tokens are to be computed"


def test_a_lost_hybrid_s_requests_go_on_elsewhere_and_the_prediction_is_compared() -> None:
    driver = hybrids()
    driver.submit("r0", num_prompt=200, first=1000)
    driver.submit("r1", num_prompt=100, first=3000)
    driver.advance(0.15)
    driver.token("D", 0, request_id="r1")
    attempt = attempt_of(driver, "r1")
    assert attempt.first_token_s == pytest.approx(0.15)
    assert driver.core.tally.timings[Timing.PREDICTION_ERROR].total_s == pytest.approx(0.15 - 0.122)
    told = attempt.to_json()["hybrid"]
    assert (told["way"], told["first_token_s"]) == ("local_prefill", pytest.approx(0.15))
    assert told["predicted"][0]["first_token_s"] == pytest.approx(0.122)
    assert driver.state("r1") is RequestState.DECODING
    driver.lose("D")
    assert driver.state("r1") is RequestState.PREFILLING, "whole on P, for there is nobody to split with"
    assert attempt_of(driver, "r1").way is Way.LOCAL_DECODE
    driver.cancel("r0")
    driver.cancel("r1")
    driver.answer_cancels()
    driver.assert_empty()
