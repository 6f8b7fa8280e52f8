"""The record of requests: what a line says and does not say, and what became of requests of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.coordinator_core import CoreDriver

from twinpool.config import RecordConfig, Role
from twinpool.coordinator.ended import SETTLE_S
from twinpool.coordinator.events import Delivered, Knocked, Record, Tick
from twinpool.coordinator.request_record import BLOCK_TOKENS, EndedRequest, LineMaker, PrefixIds
from twinpool.coordinator.service import RequestFacts
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.request import FinishReason, RequestState

KEY = b"k" * 32
PROMPT = tuple(range(3 * BLOCK_TOKENS + 5))


def _maker(*, has_ids: bool = False, key: bytes = KEY) -> LineMaker:
    return LineMaker(key, 100.0, 1_700_000_000.0, "twinpool 1", has_ids=has_ids)


def _line(ended: EndedRequest, *, is_first: bool = False, has_ids: bool = False) -> dict[str, Any]:
    raw = _maker(has_ids=has_ids).line(ended, is_first)
    assert raw.endswith(b"}\n")
    line: dict[str, Any] = msgspec.json.decode(raw)
    return line


def _ended(**values: Any) -> EndedRequest:
    return EndedRequest(
        **{
            "request_id": "acme:secret-id",
            "tenant": "acme",
            "received_at": 101.25,
            "outcome": RequestState.COMPLETED,
            "finish": FinishReason.LENGTH,
            "prompt_token_ids": PROMPT,
            "max_tokens": 7,
            "num_output_tokens": 7,
            "ttft_s": 0.25,
            "e2e_s": 1.5,
            "facts": RequestFacts(16, 37, 48, 1, 0.1, 0.0125, 0.001, 1.2),
            **values,
        }
    )


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_has_the_fields_of_the_trace_format_and_what_became_of_the_request() -> None:
    line = _line(_ended())
    tenant = line.pop("tenant")
    assert line == {
        "timestamp": 1250,
        "input_length": 53,
        "output_length": 7,
        "hash_ids": [0, 1, 2],
        "outcome": "completed",
        "finish_reason": "length",
        "queue_ms": 100.0,
        "prefill_ms": 12.5,
        "transfer_ms": 1.0,
        "decode_ms": 1200.0,
        "ttft_ms": 250.0,
        "e2e_ms": 1500.0,
        "cached_tokens": 16,
        "computed_tokens": 37,
        "transferred_tokens": 48,
        "resumed": 1,
        "max_tokens": 7,
        "choices": 1,
    }
    assert "acme" not in tenant


def test_ids_are_told_only_if_they_are_wanted_and_the_head_only_in_a_files_first_line() -> None:
    assert "request_id" not in _line(_ended())
    assert _line(_ended(), has_ids=True)["request_id"] == "acme:secret-id"
    assert "twinpool" not in _line(_ended())
    head = _line(_ended(), is_first=True)["twinpool"]
    assert head == {"block_size": BLOCK_TOKENS, "started_at": 1_700_000_000.0, "server": "twinpool 1"}


def test_tenants_are_told_apart_and_not_named() -> None:
    maker = _maker()
    lines = [
        msgspec.json.decode(maker.line(_ended(tenant=name), False)) for name in ("acme", "zeta", "acme", "")
    ]
    first, second, again, nobody = (line.get("tenant") for line in lines)
    assert first == again != second
    assert nobody is None
    other = msgspec.json.decode(_maker(key=b"o" * 32).line(_ended(), False))
    assert other["tenant"] != first, "nobody who has the file can try out names"


def test_what_was_refused_has_no_times_of_workers() -> None:
    refused = _ended(
        outcome=RequestState.REJECTED, finish=None, error_code="queue_full", facts=None, ttft_s=None
    )
    line = _line(refused)
    assert (line["outcome"], line["finish_reason"], line["error"]) == ("rejected", None, "queue_full")
    assert (line["queue_ms"], line["ttft_ms"], line["cached_tokens"]) == (None, None, None)


# ── prefixes ──────────────────────────────────────────────────────────────────────────────────────────────


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """In full blocks."""
    length = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    return length // BLOCK_TOKENS


@given(
    prompts=st.lists(
        st.lists(st.integers(0, 1), max_size=3 * BLOCK_TOKENS)
        .flatmap(lambda tail: st.sampled_from([PROMPT, PROMPT[: 2 * BLOCK_TOKENS], ()]).map(lambda p: (*p, *tail)))
        .map(tuple),
        min_size=2,
        max_size=5,
    )
)  # fmt: skip
def test_two_prompts_have_as_many_ids_in_common_as_full_blocks(prompts: list[tuple[int, ...]]) -> None:
    prefixes = PrefixIds(KEY)
    ids = [prefixes.of(prompt, "") for prompt in prompts]
    for prompt, own in zip(prompts, ids, strict=True):
        assert len(own) == len(prompt) // BLOCK_TOKENS
        for other_prompt, other in zip(prompts, ids, strict=True):
            common = _shared(prompt, other_prompt)
            assert own[:common] == other[:common]
            assert not set(own[common:]) & set(other[common:])
    seen = list(dict.fromkeys(id_ for own in ids for id_ in own))
    assert seen == list(range(len(seen))), "numbers are given out in order"


def test_prompts_with_other_salts_have_nothing_in_common() -> None:
    prefixes = PrefixIds(KEY)
    assert not set(prefixes.of(PROMPT, "a")) & set(prefixes.of(PROMPT, "b"))


def test_blocks_seen_long_ago_are_forgotten_and_their_numbers_not_given_out_again() -> None:
    prefixes = PrefixIds(KEY, most=4)
    first = prefixes.of(PROMPT, "")
    prefixes.of(PROMPT, "")
    others = [prefixes.of((n,) * BLOCK_TOKENS, "") for n in range(3)]
    again = prefixes.of(PROMPT, "")
    assert first == (0, 1, 2)
    assert others == [(3,), (4,), (5,)]
    assert again == (6, 7, 8)


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver(record=RecordConfig("unused"))
    driver.pair()
    return driver


def _recorded(driver: CoreDriver, after_s: float = SETTLE_S) -> list[EndedRequest]:
    driver.now += after_s
    return [command.ended for command in driver.do(Tick()) if isinstance(command, Record)]


def test_a_request_is_recorded_once_a_moment_after_its_end(driver: CoreDriver) -> None:
    driver.submit(max_tokens=2, num_prompt=20)
    driver.report(num_cached=16, num_computed=4)
    driver.token("P", 0)
    driver.do(Delivered("r"))
    driver.handoff()
    driver.token("D", 1, FinishReason.LENGTH)
    driver.answer_cancels()
    assert _recorded(driver, 0.5 * SETTLE_S) == []
    driver.complete(1)
    (ended,) = _recorded(driver)
    assert _recorded(driver) == []
    assert (ended.outcome, ended.finish, ended.num_output_tokens) == (
        RequestState.COMPLETED,
        FinishReason.STOP,
        1,
    )
    assert ended.facts is not None
    assert (ended.facts.num_cached_tokens, ended.facts.num_computed_tokens) == (16, 4)
    assert ended.ttft_s is not None
    assert (ended.tenant, ended.num_choices, len(ended.prompt_token_ids)) == ("", 1, 20)


def test_a_colocated_request_is_recorded_too() -> None:
    driver = CoreDriver(record=RecordConfig("unused"))
    driver.join("C", Role.COLOCATED)
    driver.submit(max_tokens=1, tenant=Tenant("acme"), num_choices=3)
    driver.token("C", 0, FinishReason.LENGTH)
    driver.answer_cancels()
    (ended,) = _recorded(driver)
    assert (ended.outcome, ended.tenant, ended.num_choices) == (RequestState.COMPLETED, "acme", 3)


def test_refused_requests_are_recorded_with_and_without_their_prompts() -> None:
    driver = CoreDriver(record=RecordConfig("unused"))
    driver.submit(num_prompt=30)
    driver.do(Knocked("k", ANYONE, 0))
    refused, unheard = _recorded(driver)
    assert {ended.outcome for ended in (refused, unheard)} == {RequestState.REJECTED}
    assert {ended.error_code for ended in (refused, unheard)} == {"no_worker"}
    assert [len(ended.prompt_token_ids) for ended in (refused, unheard)] == [30, 0]
    assert [ended.facts for ended in (refused, unheard)] == [None, None]


@pytest.mark.parametrize(
    ("end", "outcome", "code"),
    [
        (lambda driver: driver.abandon(), RequestState.CANCELLED, "cancelled"),
        (lambda driver: driver.dropped("D", "refused"), RequestState.FAILED, "request_failed"),
        (lambda driver: driver.advance(61.0), RequestState.TIMED_OUT, "no_worker"),
    ],
)
def test_however_a_request_ends_it_is_recorded(
    driver: CoreDriver, end: Any, outcome: RequestState, code: str
) -> None:
    driver.submit()
    if outcome is RequestState.TIMED_OUT:
        driver.lose("P")
        driver.lose("D")
    end(driver)
    driver.answer_cancels()
    (ended,) = _recorded(driver)
    assert (ended.outcome, ended.error_code) == (outcome, code)


def test_at_the_servers_end_nothing_is_waited_for(driver: CoreDriver) -> None:
    driver.submit()
    driver.abandon()
    (ended,) = driver.core.ended(driver.now, settle_s=0.0)
    assert ended.outcome is RequestState.CANCELLED
    assert driver.core.ended(driver.now, settle_s=0.0) == []


def test_without_a_record_nothing_is_kept() -> None:
    driver = CoreDriver()
    driver.pair()
    driver.submit()
    driver.abandon()
    driver.do(Knocked("k", ANYONE, 0))
    assert driver.core.ended(driver.now, settle_s=0.0) == []
