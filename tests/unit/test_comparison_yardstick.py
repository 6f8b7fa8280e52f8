"""What workloads are sized by: measured from a warm-up, long prompts and streams, or an error in words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.gateway import tiny_tokenizer

from twinpool.bench.comparison.arms import parse_arm
from twinpool.bench.comparison.workloads import LOADS, Model
from twinpool.bench.comparison.yardstick import (
    NUM_STREAMS,
    NothingMeasured,
    Yardstick,
    measure_yardstick,
    yardstick_arm,
)
from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Run, TokenCount
from twinpool.bench.serving.workload import PlannedRequest

TOKENIZER = tiny_tokenizer().backend


def test_prompts_are_timed_by_their_first_output_and_streams_by_their_gaps() -> None:
    sent: list[tuple[int, int]] = []

    def send(requests: Sequence[PlannedRequest], slot: str) -> Run:
        sent.append((len(requests), requests[0].input_tokens))
        slow = 9.0 if slot == "yardstick-0" else 1.0
        return _run([_record(request, 0.001 * request.input_tokens * slow, 0.03) for request in requests])

    found = measure_yardstick(send, TOKENIZER, 1, max_model_len=4096)
    assert sent == [(1, 1024), (1, 1024), (1, 1024), (NUM_STREAMS, 128)]
    assert found.prompt_token_s == pytest.approx(0.001), "the warm-up does not count"
    assert found.itl_s == pytest.approx(0.03)


def test_a_short_context_gets_shorter_requests() -> None:
    longest: list[int] = []

    def send(requests: Sequence[PlannedRequest], _slot: str) -> Run:
        longest.extend(request.input_tokens + request.output_tokens for request in requests)
        return _run([_record(request, 0.1, 0.03) for request in requests])

    measure_yardstick(send, TOKENIZER, 1, max_model_len=100)
    assert max(longest) <= 100


def test_what_failed_and_what_came_at_once_is_told() -> None:
    def fails(requests: Sequence[PlannedRequest], _slot: str) -> Run:
        return _run([_record(request, 0.1, 0.03, error="no such model") for request in requests])

    def at_once(requests: Sequence[PlannedRequest], _slot: str) -> Run:
        return _run([_record(request, 0.1, 0.0) for request in requests])

    with pytest.raises(NothingMeasured, match="no such model"):
        measure_yardstick(fails, TOKENIZER, 1, max_model_len=4096)
    with pytest.raises(NothingMeasured, match="at once"):
        measure_yardstick(at_once, TOKENIZER, 1, max_model_len=4096)


@pytest.mark.parametrize("max_model_len", [256, 2048, 8192])
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("yardstick", [Yardstick(0.002, 0.05), Yardstick(0.0001, 0.005)])
def test_loads_are_sized_to_machine_and_model(name: str, max_model_len: int, yardstick: Yardstick) -> None:
    load = LOADS[name](Model(TOKENIZER, max_model_len), yardstick, 6.0)
    requests = load.requests(1)
    assert [request.index for request in requests] == list(range(len(requests)))
    assert max(request.input_tokens + request.output_tokens for request in requests) <= max_model_len
    times = [request.at_s for request in requests if request.at_s is not None]
    assert times == sorted(times)
    assert len(times) == len(requests)
    busy_s = sum(request.input_tokens for request in requests) * yardstick.prompt_token_s
    assert busy_s < 0.9 * max(6.0, *times), "one prefill worker could do it"
    assert load.requests(1) == requests
    assert load.requests(2) != requests


def test_1p1d_is_the_yardstick_if_it_is_compared() -> None:
    tuned, whole, split = (parse_arm(text, 2048) for text in ("colocated-chunked", "colocated-whole", "1p1d"))
    assert yardstick_arm([tuned, whole, split]) == split
    assert yardstick_arm([tuned, whole]) == whole
    assert yardstick_arm([tuned]).name == "1P1D"


def _record(request: PlannedRequest, first_s: float, gap_s: float, error: str = "") -> RequestRecord:
    at = [first_s + gap_s * number for number in range(request.output_tokens)]
    return RequestRecord(
        index=request.index,
        request_id="r",
        group="",
        intended_at_s=0.0,
        sent_at_s=0.0,
        ended_at_s=at[-1],
        ending=Ending.FAILED if error else Ending.COMPLETED,
        input_tokens=request.input_tokens,
        wanted_output_tokens=request.output_tokens,
        output_tokens=request.output_tokens,
        chunks=() if error else tuple(Chunk(each, 1) for each in at),
        token_count=TokenCount.IDS,
        error=error,
    )


def _run(records: Sequence[RequestRecord]) -> Run:
    return Run(
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=1.0,
        requests=tuple(records),
        senders=(),
        settings={},
    )
