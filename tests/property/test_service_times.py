"""Whatever times: positive, finite, and never less for more work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_measurements import made_measurements
from support.public_data import public_data

from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences, together
from twinpool.planner.times.devices import Precision
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.registry import Conditions, roofline, service_times
from twinpool.planner.times.service_times import ServiceTimes, steps_ahead

ROOFLINES = [
    roofline("h100", SHAPES["llama-3.1-70b"], Conditions(tp=8)),
    roofline("a100", SHAPES["opt-13b"]),
    roofline("h200", SHAPES["qwen3-235b-a22b"], Conditions(tp=4, precision=Precision.FP8)),
    roofline("b200", SHAPES["gpt-oss-120b"], Conditions(precision=Precision.FP4)),
    roofline("mi300x", SHAPES["deepseek-v3"], Conditions(tp=8, precision=Precision.FP8)),
]
MEASURED = [
    ("splitwise:a100", "llama-2-70b", 2),
    ("splitwise:h100", "llama-2-70b", 8),
    ("distserve:opt-13b", "opt-13b", 1),
    ("distserve:opt-66b", "opt-66b", 4),
    ("dynamo:h200", "llama-3.1-8b", 1),
]
lengths = st.lists(st.integers(1, 40_000), max_size=300)
chunks = st.lists(st.tuples(st.integers(1, 9_000), st.integers(0, 40_000)), max_size=4)


@pytest.fixture(scope="module")
def all_times(tmp_path_factory: pytest.TempPathFactory) -> Sequence[ServiceTimes]:
    """Rooflines, and the measured kinds over figures made up here, and over those published where they are."""
    folders: list[Path] = [made_measurements(tmp_path_factory.mktemp("measurements"))]
    if (public_data() / "perf").is_dir():
        folders.append(public_data())
    measured = [
        service_times(spec, SHAPES[model], Conditions(tp=tp, public_data=folder))
        for folder in folders
        for spec, model, tp in MEASURED
    ]
    return [*ROOFLINES, *measured]


def shape_of(sequence_lengths: list[int], chunk_lengths: list[tuple[int, int]]) -> StepShape:
    return together(of_sequences(sequence_lengths), *(of_chunk(new, cached) for new, cached in chunk_lengths))


@given(lengths, chunks, lengths, chunks, st.integers(0, 5_000))
def test_more_work_never_takes_less_time(
    all_times: Sequence[ServiceTimes],
    sequences: list[int],
    prompts: list[tuple[int, int]],
    more_sequences: list[int],
    more_prompts: list[tuple[int, int]],
    num_steps: int,
) -> None:
    less = shape_of(sequences, prompts)
    for more in (
        shape_of(sequences + more_sequences, prompts + more_prompts),
        shape_of(sequences, [(new + num_steps, cached) for new, cached in prompts]),
        shape_of(sequences, [(new, cached + num_steps) for new, cached in prompts]),
        less.after(num_steps),
    ):
        for times in all_times:
            assert times.step_s(more) >= times.step_s(less) * (1 - 1e-12), times.name


@given(lengths, chunks)
def test_every_step_takes_some_time(
    all_times: Sequence[ServiceTimes], sequences: list[int], prompts: list[tuple[int, int]]
) -> None:
    shape = shape_of(sequences, prompts)
    for times in all_times:
        taken_s = times.step_s(shape)
        assert math.isfinite(taken_s), times.name
        assert (taken_s > 0) == bool(sequences or prompts), times.name


@given(st.integers(0, 10**13), st.integers(0, 10**13))
def test_more_bytes_never_take_less_time(all_times: Sequence[ServiceTimes], one: int, more: int) -> None:
    for times in all_times:
        assert 0 < times.transfer_s(one) <= times.transfer_s(one + more) < math.inf, times.name


@given(lengths, chunks)
def test_no_estimate_is_below_its_own_floor(sequences: list[int], prompts: list[tuple[int, int]]) -> None:
    shape = shape_of(sequences, prompts)
    for times in ROOFLINES:
        assert times.step_s(shape) >= times.floor_s(shape), times.name


@given(lengths, chunks, lengths, chunks)
def test_a_floor_never_falls_either(
    sequences: list[int],
    prompts: list[tuple[int, int]],
    more_sequences: list[int],
    more_prompts: list[tuple[int, int]],
) -> None:
    less = shape_of(sequences, prompts)
    more = shape_of(sequences + more_sequences, prompts + more_prompts)
    for times in ROOFLINES:
        assert times.floor_s(more) >= times.floor_s(less) * (1 - 1e-12), times.name


@given(lengths, chunks, st.integers(0, 40), st.integers(0, 2))
def test_steps_ahead_are_the_steps_one_by_one(
    all_times: Sequence[ServiceTimes],
    sequences: list[int],
    prompts: list[tuple[int, int]],
    num_steps: int,
    num_busy: int,
) -> None:
    shape = shape_of(sequences, prompts)
    for times in all_times:
        one_by_one = [times.step_s(shape.after(number), num_busy) for number in range(num_steps)]
        assert list(steps_ahead(times)(shape, num_steps, num_busy)) == one_by_one
