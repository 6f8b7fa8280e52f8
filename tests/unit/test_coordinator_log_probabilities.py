"""Log probabilities on their way to the client: each beside its token, the prompt's once and with the first."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver
from support.jobs import told

from twinpool.bounds import MOST_PROMPT_LOGPROBS
from twinpool.config import Role
from twinpool.errors import InvalidRequest
from twinpool.messages import Prefill
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason, RequestState, TokenLogprobs

PROMPT = tuple(told(token, 1) for token in range(101, 110))
"""Of the ten tokens of a request's prompt, all but the first."""


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver()
    driver.pair()
    return driver


def of(index: int) -> TokenLogprobs:
    return told(1000 + index, 2)


def test_tokens_that_came_before_their_turn_keep_theirs(driver: CoreDriver) -> None:
    driver.submit(max_tokens=4, sampling={"logprobs": 2})
    driver.handoff()
    driver.token("D", 1, logprobs=of(1))
    driver.token("D", 2, logprobs=of(2))
    driver.token("P", 0, logprobs=of(0))
    driver.token("D", 3, FinishReason.LENGTH, logprobs=of(3))
    assert [(o.token_ids, o.logprobs) for o in driver.outputs["r"]] == [
        ((1000, 1001, 1002), (of(0), of(1), of(2))),
        ((1003,), (of(3),)),
    ]
    driver.assert_empty()


def test_a_request_that_asks_for_none_gets_none(driver: CoreDriver) -> None:
    driver.submit(max_tokens=1)
    driver.token("P", 0, FinishReason.LENGTH)
    (output,) = driver.outputs["r"]
    assert (output.logprobs, output.prompt_logprobs) == ((), None)
    driver.assert_empty()


def test_those_of_the_prompt_come_with_the_first_output_that_has_tokens_and_never_again(
    driver: CoreDriver,
) -> None:
    driver.submit(max_tokens=3, sampling={"prompt_logprobs": 1})
    driver.prompt_logprobs("P", PROMPT)
    assert "r" not in driver.outputs
    driver.handoff()
    driver.token("D", 1)
    driver.token("P", 0)
    driver.token("D", 2, FinishReason.LENGTH)
    assert [o.prompt_logprobs for o in driver.outputs["r"]] == [PROMPT, None]
    driver.assert_empty()


def test_an_attempt_that_is_lost_before_the_first_token_takes_what_it_told_of_the_prompt_with_it(
    driver: CoreDriver,
) -> None:
    driver.submit(max_tokens=1, sampling={"prompt_logprobs": 1})
    driver.prompt_logprobs("P", tuple(told(0, 1) for _ in PROMPT))
    driver.dropped("P", "transfer")
    driver.answer_cancels()
    driver.prompt_logprobs("P", PROMPT, attempt=2)
    driver.token("P", 0, FinishReason.LENGTH, attempt=2)
    (output,) = driver.outputs["r"]
    assert output.prompt_logprobs == PROMPT
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 0
    driver.assert_empty()


def test_an_attempt_after_the_first_token_is_asked_for_none_of_the_prompt(driver: CoreDriver) -> None:
    driver.submit(max_tokens=2, sampling={"prompt_logprobs": 1})
    driver.prompt_logprobs("P", PROMPT)
    driver.token("P", 0)
    driver.dropped("D", "preempted")
    driver.answer_cancels()
    driver.advance(0.3)
    jobs = [message.job for message in driver.sent_to("P") if isinstance(message, Prefill)]
    assert [job.wants_prompt_logprobs for job in jobs] == [True, False]
    driver.token("P", 1, FinishReason.LENGTH, attempt=2)
    assert [o.prompt_logprobs for o in driver.outputs["r"]] == [PROMPT, None]
    driver.assert_empty()


@pytest.mark.parametrize("num_entries", [0, 8, 10])
def test_another_number_than_the_prompts_is_a_fault_and_the_attempt_is_lost(
    driver: CoreDriver, num_entries: int
) -> None:
    driver.submit(max_tokens=1, sampling={"prompt_logprobs": 1})
    driver.prompt_logprobs("P", (told(7, 1),) * num_entries)
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1
    assert f"P sent log probabilities of {num_entries} prompt tokens, wanted are 9" in driver.notes[-1].text
    driver.answer_cancels()
    driver.prompt_logprobs("P", PROMPT, attempt=2)
    driver.token("P", 0, FinishReason.LENGTH, attempt=2)
    assert driver.outputs["r"][0].prompt_logprobs == PROMPT
    driver.assert_empty()


@pytest.mark.parametrize("sampling", [{}, {"prompt_logprobs": 1}], ids=["not asked for", "told before"])
def test_what_was_not_asked_for_or_comes_twice_is_a_fault(
    driver: CoreDriver, sampling: dict[str, int]
) -> None:
    driver.submit(max_tokens=2, sampling=sampling)
    if sampling:
        driver.prompt_logprobs("P", PROMPT)
    driver.prompt_logprobs("P", PROMPT)
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1
    assert driver.core.timeline("r").attempts[0].ended == "protocol"  # type: ignore[union-attr]


def test_decode_has_nothing_to_say_of_a_prompt(driver: CoreDriver) -> None:
    driver.submit(max_tokens=2, sampling={"prompt_logprobs": 1})
    driver.prompt_logprobs("D", PROMPT)
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1


def test_a_first_token_without_what_was_asked_of_the_prompt_is_a_fault(driver: CoreDriver) -> None:
    driver.submit(max_tokens=2, sampling={"prompt_logprobs": 0})
    driver.token("P", 0)
    assert driver.tokens() == []
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_token_without_what_was_asked_or_with_what_was_not_is_a_fault(
    driver: CoreDriver, is_asked: bool
) -> None:
    driver.submit(max_tokens=2, sampling={"logprobs": 2} if is_asked else {})
    driver.token("P", 0, logprobs=None if is_asked else of(0))
    assert driver.tokens() == []
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 1
    assert f"token 0 with{'out' if is_asked else ''} log probabilities" in driver.notes[-1].text


def test_words_of_a_lost_attempt_about_the_prompt_are_stale(driver: CoreDriver) -> None:
    driver.submit(max_tokens=2, sampling={"prompt_logprobs": 1})
    driver.dropped("D", "transfer")
    driver.prompt_logprobs("P", PROMPT)
    assert driver.count(CoordinatorMetric.STALE_MESSAGES) == 1
    assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 0


def test_more_of_them_than_one_message_may_have_are_refused_before_any_work() -> None:
    driver = CoreDriver(max_queue_tokens=1 << 20)
    driver.join("K", Role.COLOCATED, num_blocks=1 << 16, max_model_len=1 << 20)
    most = MOST_PROMPT_LOGPROBS // 21
    driver.submit("fits", num_prompt=most, sampling={"prompt_logprobs": 20})
    assert driver.state("fits") is RequestState.PREFILLING
    driver.submit("more", num_prompt=most + 1, sampling={"prompt_logprobs": 20})
    error = driver.refusals["more"]
    assert isinstance(error, InvalidRequest)
    assert error.param == "prompt_logprobs"
    assert f"the prompt has {most + 1} tokens" in error.message


def test_who_cannot_go_on_is_told_why_and_both_workers_let_go(driver: CoreDriver) -> None:
    driver.submit(max_tokens=4)
    driver.token("P", 0)
    driver.handoff()
    driver.dropped("D", "refused")
    (last,) = driver.outputs["r"][1:]
    assert last.finish is FinishReason.ERROR
    assert last.error is not None
    assert "worker D cannot run the request" in last.error.message
    assert driver.state() is RequestState.FAILED
    assert len(driver.core.timeline("r").attempts) == 1  # type: ignore[union-attr]
    driver.assert_empty()
