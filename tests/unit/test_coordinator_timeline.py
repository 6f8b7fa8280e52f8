"""A request's timeline adds up, and says what its numbers mean."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver

from twinpool.coordinator.events import Delivered
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
