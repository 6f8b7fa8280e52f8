"""What a server adds to the engine: found again from runs that were made with known overheads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
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
from twinpool.planner.profile.served import QUICK, Loaded, OverheadLoads, ServedRuns, served_of
from twinpool.planner.step_shape import of_chunk, of_sequences

BETWEEN_S, SEQUENCE_S, STEP_CPU_S, TOKEN_CPU_S = 1e-4, 2e-5, 6e-4, 9e-5
REQUEST_S, TOKEN_S, CONTROL_S, DELIVER_S, HANDOFF_S, LAST_LAYER_S = 2e-3, 1e-6, 3e-4, 2e-4, 1e-3, 4e-4
PREFILL_S, DECODE_STEP_S, REQUEST_CPU_S = 0.05, 0.03, 5e-3


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


def loaded(records: Sequence[RequestRecord], steps: int) -> Loaded:
    num_tokens = sum(each.output_tokens for each in records)
    cpu_s = REQUEST_CPU_S * len(records) + STEP_CPU_S * steps + TOKEN_CPU_S * num_tokens
    return Loaded(run_of(records), steps, steps * DECODE_STEP_S, cpu_s)


def singles(*, is_split: bool = True) -> tuple[Loaded, Loaded]:
    """Short and long ones."""
    short, long = ([single(n, prompt, is_split=is_split) for n in range(5)] for prompt in (32, 512))
    return loaded(short, 5), loaded(long, 5)


def streams(count: int, *, is_split: bool = True, between_s: float = BETWEEN_S) -> Loaded:
    """So many streams, all of whose tokens come at once."""
    num_tokens, every_s = 40, DECODE_STEP_S + between_s + SEQUENCE_S * count
    skipped = int(is_split)
    chunks = [
        *([Chunk(0.5, 1)] * skipped),
        *(Chunk(1.0 + n * every_s, 1) for n in range(num_tokens - skipped)),
    ]
    beside = [Stage("transfer", 0.0, 0.4)] if is_split else []
    return loaded([record(index, 8, chunks, [], beside) for index in range(count)], num_tokens - skipped)


def test_overheads_are_told_apart() -> None:
    runs = ServedRuns(*singles(), {count: streams(count) for count in (1, 4, 16)})
    found = served_of(runs, lambda _: LAST_LAYER_S, shares_cores=False)
    assert msgspec.structs.astuple(found.steps) == pytest.approx(
        (BETWEEN_S, SEQUENCE_S, STEP_CPU_S / 2, TOKEN_CPU_S / 2)
    )
    over = found.overheads
    assert over.request_s == pytest.approx(REQUEST_S)
    assert over.prompt_token_s == pytest.approx(TOKEN_S)
    assert over.control_s == pytest.approx(CONTROL_S)
    assert over.output_s == pytest.approx(CONTROL_S + DELIVER_S)
    assert over.handoff_s == pytest.approx(HANDOFF_S)
    assert all(sample.num_runs for sample in found.samples)


def test_a_worker_on_all_cores_is_delayed_by_what_delivers_its_tokens_and_hands_nothing_over() -> None:
    runs = ServedRuns(*singles(is_split=False), {count: streams(count, is_split=False) for count in (1, 8)})
    found = served_of(runs, None, shares_cores=True)
    assert found.overheads.handoff_s == 0
    assert msgspec.structs.astuple(found.steps) == pytest.approx(
        (BETWEEN_S + STEP_CPU_S, SEQUENCE_S + TOKEN_CPU_S, 0.0, 0.0)
    )


def test_steps_between_which_nothing_passes_add_nothing() -> None:
    """Clocks and noise can make it less than nothing; no overhead is negative for that."""
    runs = ServedRuns(*singles(), {4: streams(4, between_s=-0.01)})
    found = served_of(runs, lambda _: LAST_LAYER_S, shares_cores=False)
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
