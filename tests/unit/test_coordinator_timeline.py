"""A request's timeline adds up, and says what its numbers mean."""

from __future__ import annotations

import pytest
from support.coordinator_core import LAYOUT, CoreDriver

from twinpool.config import Role
from twinpool.coordinator.events import Delivered
from twinpool.coordinator.service import RequestFacts
from twinpool.metrics import Timing
from twinpool.request import FinishReason


@pytest.fixture
def driver() -> CoreDriver:
    return CoreDriver()


def test_the_time_to_the_first_token_is_told_apart_from_the_hand_over_of_a_whole_answer(
    driver: CoreDriver,
) -> None:
    driver.now = 10.0
    driver.pair()
    driver.submit(max_tokens=2)
    assert all(driver.core.timeline("r").to_json(10.0)[name] is None for name in ("first_token_s", "ttft_s"))
    driver.now = 10.25
    driver.token("P", 0)
    driver.handoff()
    driver.now = 11.0
    driver.token("D", 1, FinishReason.LENGTH)
    driver.do(Delivered("r"))
    values = driver.core.timeline("r").to_json(driver.now)
    assert (values["first_token_s"], values["ttft_s"], values["e2e_s"]) == (0.253, 1.003, 1.003)
    assert values["stages_s"]["deliver"] == 0.75
    driver.assert_empty()


def test_no_first_output_comes_after_the_last_however_late_it_was_handed_over(driver: CoreDriver) -> None:
    """A whole answer, or the only token of a stream, is with the connection a moment after it was ready."""
    driver.pair()
    driver.submit(max_tokens=1)
    driver.token("P", 0, FinishReason.LENGTH)
    ready_s = driver.core.timeline("r").to_json(driver.now)["e2e_s"]
    driver.now += 0.25
    driver.do(Delivered("r"))
    driver.now = 99.0
    values = driver.core.timeline("r").to_json(driver.now)
    assert values["ttft_s"] == values["e2e_s"] == ready_s + 0.25
    driver.answer_cancels()
    driver.assert_empty()


def test_a_route_says_what_its_costs_count(driver: CoreDriver) -> None:
    driver.pair()
    driver.submit()
    route = driver.core.timeline("r").to_json(driver.now)["attempts"][0]["route"]
    assert [(c["worker"], c["cost_unit"]) for c in route] == [
        ("P", "prompt tokens"),
        ("D", "share of the worker"),
    ]


def test_the_stages_add_up_to_what_the_client_saw(driver: CoreDriver) -> None:
    driver.now = 10.0
    driver.pair()
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
    assert (values["first_token_s"], values["ttft_s"]) == (0.126457, 0.203)
    assert values["transfer"]["gb_per_s"] == pytest.approx(4096 / 0.001 / 1e9)
    assert values["attempts"][0]["route"][0]["worker"] == "P"
    assert sum(driver.core.tally.timings[Timing.TTFT].counts) == 1
    driver.assert_empty()


def test_the_stages_add_up_over_a_lost_first_attempt_too(driver: CoreDriver) -> None:
    driver.now = 5.0
    driver.pair()
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


def facts(driver: CoreDriver) -> RequestFacts:
    timeline = driver.core.timeline("r")
    assert timeline is not None
    return timeline.facts(driver.now, LAYOUT.block_size)


def counted(driver: CoreDriver) -> tuple[int, int, int, int]:
    """Tokens cached, computed and transferred, and how often it was resumed."""
    told = facts(driver)
    return told.num_cached_tokens, told.num_computed_tokens, told.num_transferred_tokens, told.num_resumed


def test_facts_before_anything_is_computed_are_zeros(driver: CoreDriver) -> None:
    driver.pair()
    driver.submit(num_prompt=40)
    assert counted(driver) == (0, 0, 0, 0)


def test_facts_of_a_split_request_count_its_prompt_once_and_what_moved(driver: CoreDriver) -> None:
    driver.now = 10.0
    driver.pair()
    driver.submit(num_prompt=40, max_tokens=2)
    driver.now = 10.25
    driver.report(num_cached=16, num_computed=24)
    driver.token("P", 0)
    assert counted(driver) == (16, 24, 0, 0)
    driver.now = 10.5
    driver.handoff(num_blocks_cached=1)
    driver.now = 11.0
    driver.token("D", 1, FinishReason.LENGTH)
    driver.now = 20.0
    assert counted(driver) == (16, 24, 24, 0)
    told = facts(driver)
    assert (told.queue_s, told.prefill_s, told.transfer_s, told.decode_s) == (0.0, 0.25, 0.25, 0.5)
    driver.assert_empty()


def test_nothing_moved_where_decode_held_it_all_and_a_part_of_a_block_is_not_less_than_nothing(
    driver: CoreDriver,
) -> None:
    driver.pair()
    driver.submit(num_prompt=40, max_tokens=2)
    driver.report(num_cached=32, num_computed=8)
    driver.token("P", 0)
    driver.handoff(num_blocks_cached=3)
    assert counted(driver) == (32, 8, 0, 0)


def test_facts_of_a_colocated_request_have_nothing_that_moved() -> None:
    driver = CoreDriver()
    driver.join("K", Role.COLOCATED)
    driver.submit(num_prompt=40, max_tokens=2)
    driver.report(worker_id="K", num_cached=32, num_computed=8)
    driver.token("K", 0)
    driver.token("K", 1, FinishReason.LENGTH)
    assert counted(driver) == (32, 8, 0, 0)
    driver.assert_empty()


def test_an_attempt_that_is_lost_before_the_first_token_counts_nowhere_but_as_one_resumed(
    driver: CoreDriver,
) -> None:
    driver.pair()
    driver.submit(num_prompt=40, max_tokens=2)
    driver.report(num_cached=0, num_computed=40)
    driver.dropped("P", "transfer")
    driver.answer_cancels()
    driver.report(attempt=2, num_cached=32, num_computed=8)
    assert counted(driver) == (0, 0, 0, 1)
    driver.token("P", 0, attempt=2)
    driver.handoff(attempt=2)
    driver.token("D", 1, FinishReason.LENGTH, attempt=2)
    assert counted(driver) == (32, 8, 40, 1)
    driver.assert_empty()


def test_an_attempt_after_the_first_token_adds_what_it_moved_and_nothing_to_the_prompt(
    driver: CoreDriver,
) -> None:
    """No time passes between the first token and the next attempt: the facts do not go by the clock."""
    driver.pair()
    driver.submit(num_prompt=40, max_tokens=3)
    driver.report(num_cached=0, num_computed=40)
    driver.token("P", 0)
    driver.handoff()
    driver.dropped("D", "transfer")
    driver.answer_cancels()
    driver.report(attempt=2, num_cached=32, num_computed=9)
    driver.token("P", 1, attempt=2)
    driver.handoff(attempt=2, num_blocks_cached=1)
    driver.token("D", 2, FinishReason.LENGTH, attempt=2)
    assert counted(driver) == (0, 40, 40 + 25, 1)
    driver.assert_empty()
