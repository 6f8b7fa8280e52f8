"""What a server adds to the engine: found again from runs that were made with known overheads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from support.made_profiles import made_profile
from support.made_tokenizers import byte_level

from twinpool.bench.serving.record import (
    Chunk,
    Ending,
    RequestRecord,
    Run,
    ServerTimeline,
    Stage,
    TokenCount,
)
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import ServedSteps
from twinpool.planner.profile.served import served_of
from twinpool.planner.profile.served_loads import QUICK, Loaded, OverheadLoads, RanSteps, ServedRuns
from twinpool.planner.step_shape import of_chunk, of_sequences
from twinpool.planner.times.service_times import Overheads

BETWEEN_S, SEQUENCE_S, LOST_S, LOST_TOKEN_S, CHUNK_S = 1e-4, 2e-5, 6e-4, 9e-5, 2e-3
DELIVERY_S, DELIVERY_TOKEN_S, BUSY_S, BUSY_TOKEN_S, BUSY_CHUNK_S = 1.5e-3, 1e-4, 8e-4, 2e-5, 1e-3
REQUEST_S, TOKEN_S, CONTROL_S, DELIVER_S, HANDOFF_S, LAST_LAYER_S = 2e-3, 1e-6, 3e-4, 2e-4, 1e-3, 4e-4
PREFILL_S, DECODE_STEP_S = 0.05, 0.03
"""`DECODE_STEP_S` is what a step computes; what it loses comes on top."""


def record(
    index: int, prompt: int, chunks: Sequence[Chunk], stages: Sequence[Stage], beside: Sequence[Stage] = ()
) -> RequestRecord:
    return RequestRecord(
        index=index, request_id=f"{index}", group="", intended_at_s=0.0, sent_at_s=0.0,
        ended_at_s=chunks[-1].at_s, ending=Ending.COMPLETED, input_tokens=prompt,
        wanted_output_tokens=len(chunks), output_tokens=len(chunks), chunks=tuple(chunks),
        token_count=TokenCount.IDS,
        timeline=ServerTimeline(
            ttft_s=None, e2e_s=None, stages=tuple(stages), beside=tuple(beside), prefill_s=PREFILL_S
        ),
    )  # fmt: skip


def run_of(records: Sequence[RequestRecord]) -> Run:
    return Run(started_at="", duration_s=9.0, requests=tuple(records), senders=(), settings={})


def single(index: int, prompt: int, *, is_split: bool = True) -> RequestRecord:
    """A request alone, of a server with the overheads above."""
    stage_s = PREFILL_S + 2 * CONTROL_S
    first_s = REQUEST_S + TOKEN_S * prompt + stage_s + DELIVER_S
    stages = [Stage("queue", 0.0, 0.0), Stage("prefill", 0.0, stage_s), Stage("deliver", 0.0, DELIVER_S)]
    beside = [Stage("transfer", 0.0, LAST_LAYER_S + CONTROL_S + HANDOFF_S)] if is_split else []
    return record(index, prompt, [Chunk(first_s, 1), Chunk(first_s + 0.05, 1)], stages, beside)


def ran(steps: int, own_s: float, lost_s: float) -> RanSteps:
    return RanSteps(steps, steps * (own_s + lost_s), steps * own_s)


def singles(*, is_split: bool = True) -> tuple[Loaded, Loaded]:
    """Short and long ones, which get three tokens each."""
    found = []
    for prompt in (32, 512):
        run = run_of([single(n, prompt, is_split=is_split) for n in range(5)])
        decode = ran(10, DECODE_STEP_S, LOST_S + LOST_TOKEN_S)
        prompts = ran(5, PREFILL_S, LOST_S + LOST_TOKEN_S + CHUNK_S)
        if is_split:
            found.append(Loaded(run, prompts, decode))
        else:
            both = RanSteps(15, prompts.step_s + decode.step_s, prompts.own_s + decode.own_s)
            found.append(Loaded(run, both, both))
    return found[0], found[1]


def streams(
    count: int, *, is_split: bool = True, between_s: float = BETWEEN_S, busy_s: float = 0.0
) -> Loaded:
    """So many streams, all of whose tokens come at once. Their steps together lose `busy_s` more."""
    num_tokens, skipped = 40, int(is_split)
    num_steps, lost_s = num_tokens - skipped, LOST_S + LOST_TOKEN_S * count
    lost_s += busy_s / num_steps
    every_s = DECODE_STEP_S + lost_s + between_s + SEQUENCE_S * count
    chunks = [*([Chunk(0.5, 1)] * skipped), *(Chunk(1.0 + n * every_s, 1) for n in range(num_steps))]
    beside = [Stage("transfer", 0.0, 0.4)] if is_split else []
    run = run_of([record(index, 8, chunks, [], beside) for index in range(count)])
    decode = ran(num_steps, DECODE_STEP_S, lost_s)
    return Loaded(run, ran(1, 0.02, 0.0) if is_split else decode, decode)


def prompts_beside(count: int, busy_share: float) -> Loaded:
    """Prompts while so many streams get their tokens."""
    num_prompts, num_delivered = 8, 39 * busy_share
    both = streams(count, busy_s=num_delivered * (BUSY_S + BUSY_TOKEN_S * count))
    times = both.run.requests[0].chunks
    prompt_s = (times[-1].at_s - times[1].at_s) * busy_share
    lost_s = num_delivered * (DELIVERY_S + DELIVERY_TOKEN_S * count) + num_prompts * (
        LOST_S + LOST_TOKEN_S + CHUNK_S + BUSY_CHUNK_S
    )
    requests = [
        *both.run.requests,
        *(record(count + n, 256, [Chunk(1.2, 1)], []) for n in range(num_prompts)),
    ]
    return Loaded(run_of(requests), RanSteps(num_prompts, prompt_s, prompt_s - lost_s), both.decode)


def test_overheads_are_told_apart() -> None:
    runs = ServedRuns(
        *singles(),
        {count: streams(count) for count in (1, 4, 16)},
        {
            (count, int(1000 * share)): prompts_beside(count, share)
            for count in (1, 8)
            for share in (0.2, 0.8)
        },
    )
    found = served_of(runs, lambda _: LAST_LAYER_S)
    assert found.steps == ServedSteps(
        step_s=pytest.approx(BETWEEN_S + LOST_S), sequence_s=pytest.approx(SEQUENCE_S + LOST_TOKEN_S),
        chunk_s=pytest.approx(CHUNK_S), beside_chunk_s=pytest.approx(BUSY_CHUNK_S),
        busy_step_s=pytest.approx(BUSY_S), busy_sequence_s=pytest.approx(BUSY_TOKEN_S),
    )  # fmt: skip
    assert found.overheads == Overheads(
        request_s=pytest.approx(REQUEST_S), prompt_token_s=pytest.approx(TOKEN_S), control_s=pytest.approx(CONTROL_S),
        output_s=pytest.approx(CONTROL_S + DELIVER_S), handoff_s=pytest.approx(HANDOFF_S),
        delivery_s=pytest.approx(DELIVERY_S), delivery_token_s=pytest.approx(DELIVERY_TOKEN_S),
    )  # fmt: skip
    assert all(sample.num_runs for sample in found.samples)


def test_a_worker_that_does_both_hands_nothing_over_and_has_no_neighbour() -> None:
    runs = ServedRuns(
        *singles(is_split=False), {count: streams(count, is_split=False) for count in (1, 8)}, {}
    )
    found = served_of(runs, None)
    assert found.overheads.handoff_s == found.overheads.delivery_s == 0
    assert found.steps == ServedSteps(
        step_s=pytest.approx(BETWEEN_S + LOST_S), sequence_s=pytest.approx(SEQUENCE_S + LOST_TOKEN_S),
        chunk_s=pytest.approx(CHUNK_S),
    )  # fmt: skip


def test_steps_between_which_nothing_passes_add_nothing() -> None:
    """Clocks and noise can make it less than nothing; no overhead is negative for that."""
    runs = ServedRuns(*singles(), {4: streams(4, between_s=-0.01)}, {})
    found = served_of(runs, lambda _: LAST_LAYER_S)
    assert (found.steps.step_s, found.steps.sequence_s) == (0.0, 0.0)


def test_single_requests_are_over_before_the_next_one_comes_and_streams_begin_together() -> None:
    times = FittedTimes(made_profile())
    loads = OverheadLoads(byte_level(), 256, times, QUICK)
    alone, together = loads.singles(512, 1), loads.streams(8, 200, 1)
    apart_s = {round(after.at_s - before.at_s, 9) for before, after in itertools.pairwise(alone)}
    assert len(alone) == QUICK.singles
    assert min(apart_s) > times.step_s(of_chunk(128)) + 3 * times.step_s(of_sequences([131]))
    assert [request.at_s for request in together] == [0.0] * 8
    assert {request.input_tokens for request in alone} == {128}, "half of what the model takes"
    assert {request.output_tokens for request in together} == {64}, "a quarter of that"


def test_prompts_beside_streams_come_while_these_run() -> None:
    times = FittedTimes(made_profile())
    requests = OverheadLoads(byte_level(), 1024, times, QUICK).beside(8, 128, 1)
    streams, prompts = requests[:8], requests[8:]
    assert [request.index for request in requests] == list(range(len(requests)))
    assert {request.output_tokens for request in prompts} == {2}
    assert len(prompts) >= QUICK.singles
    last_s = streams[0].output_tokens * times.step_s(of_sequences([8] * 8))
    assert all(0 < (request.at_s or 0.0) < last_s for request in prompts)
