"""What a server adds to the engine: found again from runs that were made with known overheads."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.made_profiles import made_profile

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
from twinpool.planner.profile.served import ServedRuns, served_of
from twinpool.planner.step_shape import of_chunk, of_sequences

TIMES = FittedTimes(msgspec.structs.replace(made_profile(), served=ServedSteps()))
STEP_S, SEQUENCE_S, BUSY_S = 1e-4, 2e-5, 3e-5
REQUEST_S, TOKEN_S, CONTROL_S, DELIVER_S, HANDOFF_S, LAST_LAYER_S = 2e-3, 1e-6, 3e-4, 2e-4, 1e-3, 4e-4


def record(
    index: int, prompt: int, chunks: Sequence[Chunk], stages: Sequence[Stage], group: str = ""
) -> RequestRecord:
    return RequestRecord(
        index=index, request_id=f"{index}", group=group, intended_at_s=0.0, sent_at_s=0.0,
        ended_at_s=chunks[-1].at_s, ending=Ending.COMPLETED, input_tokens=prompt,
        wanted_output_tokens=len(chunks), output_tokens=len(chunks), chunks=tuple(chunks),
        token_count=TokenCount.IDS,
        timeline=ServerTimeline(ttft_s=None, e2e_s=None, stages=tuple(stages)),
    )  # fmt: skip


def run_of(records: Sequence[RequestRecord]) -> Run:
    return Run(started_at="", duration_s=9.0, requests=tuple(records), senders=(), settings={})


def single(index: int, prompt: int) -> RequestRecord:
    """A request alone, of a server with the overheads above."""
    prefill_s = TIMES.step_s(of_chunk(prompt)) + STEP_S + 2 * CONTROL_S
    first_s = REQUEST_S + TOKEN_S * prompt + prefill_s + DELIVER_S
    step_s = TIMES.step_s(of_sequences([prompt + 1])) + STEP_S + SEQUENCE_S
    second_s = first_s + LAST_LAYER_S + CONTROL_S + HANDOFF_S + step_s
    stages = [Stage("queue", 0.0, 0.0), Stage("prefill", 0.0, prefill_s), Stage("deliver", 0.0, DELIVER_S)]
    return record(index, prompt, [Chunk(first_s, 1), Chunk(second_s, 1)], stages)


def streams(count: int, num_busy: int = 0, num_tokens: int = 40) -> list[RequestRecord]:
    """So many streams, all tokens at once, whose steps take what a server adds longer."""
    chunks, at_s = [Chunk(1.0, 1)], 1.0
    for number in range(1, num_tokens):
        at_s += TIMES.step_s(of_sequences([32 + number] * count), num_busy)
        at_s += STEP_S + (SEQUENCE_S + num_busy * BUSY_S) * count
        chunks.append(Chunk(at_s, 1))
    return [record(index, 32, chunks, [], "streams" if num_busy else "") for index in range(count)]


def test_overheads_are_told_apart() -> None:
    beside = [*streams(8, 1), record(99, 256, [Chunk(50.0, 1)], [], "prompts")]
    runs = ServedRuns(
        short=run_of([single(n, 32) for n in range(5)]),
        long=run_of([single(n, 512) for n in range(5)]),
        streams={count: run_of(streams(count)) for count in (1, 4, 16)},
        beside=run_of(beside),
    )
    found = served_of(runs, TIMES, lambda _: LAST_LAYER_S)
    assert found.steps == ServedSteps(*(pytest.approx(s) for s in (STEP_S, SEQUENCE_S, BUSY_S)))
    over = found.overheads
    assert over.request_s == pytest.approx(REQUEST_S)
    assert over.prompt_token_s == pytest.approx(TOKEN_S)
    assert over.control_s == pytest.approx(CONTROL_S)
    assert over.output_s == pytest.approx(CONTROL_S + DELIVER_S)
    assert over.handoff_s == pytest.approx(HANDOFF_S)
    assert all(sample.num_runs for sample in found.samples)


def test_a_server_without_a_second_pool_hands_nothing_over() -> None:
    runs = ServedRuns(
        short=run_of([single(n, 32) for n in range(3)]),
        long=run_of([single(n, 512) for n in range(3)]),
        streams={count: run_of(streams(count)) for count in (1, 8)},
        beside=None,
    )
    found = served_of(runs, TIMES, None)
    assert found.overheads.handoff_s == 0
    assert found.steps.busy_sequence_s == 0


def test_steps_that_a_server_makes_no_longer_add_nothing() -> None:
    """Noise can make them shorter; no overhead is negative for that."""
    quick = [
        msgspec.structs.replace(each, chunks=tuple(Chunk(1.0 + 1e-4 * n, 1) for n in range(40)))
        for each in streams(4)
    ]
    runs = ServedRuns(run_of([single(0, 32)]), run_of([single(0, 512)]), {4: run_of(quick)}, None)
    assert served_of(runs, TIMES, None).steps == ServedSteps()
