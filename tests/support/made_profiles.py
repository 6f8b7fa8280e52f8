"""Profiles whose truth is known: samples of a made-up worker, and what is fitted to them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from twinpool.planner.profile.cases import StepCase, full_plan
from twinpool.planner.profile.fit import fit_steps
from twinpool.planner.profile.saved import (
    Measurements,
    Noise,
    Profile,
    Residuals,
    ServedSteps,
    SlowDown,
    StepFit,
    StepSample,
    TransferFit,
    Unsteadiness,
)
from twinpool.planner.profile.step_model import StepModel
from twinpool.planner.times.service_times import Overheads

PLAN = full_plan(8192)
TILE = 32
TRUE_FIT = StepFit(
    row_knots=PLAN.row_knots,
    row_tiles=tuple(TILE if rows >= TILE else 1 for rows in (0, *PLAN.row_knots[:-1])),
    rows_s=tuple(0.009 + 4e-4 * rows + (0.003 if rows > TILE else 0.0) for rows in PLAN.row_knots),
    sequence_s=5e-5,
    chunk_s=1e-4,
    context_token_s=1e-6,
    prompt_pair_s=3e-9,
    prompt_context_token_s=2e-7,
    both_s=2e-3,
    beside_sequence_s=3e-4,
)
TRUE_SLOW_DOWN = SlowDown(memory=0.4, arithmetic=0.05)


def true_s(case: StepCase, num_busy: int = 0) -> float:
    """What the made-up worker takes for a step."""
    memory_s, arithmetic_s = StepModel(TRUE_FIT).parts(case.shape)
    busy_s = TRUE_SLOW_DOWN.memory * memory_s + TRUE_SLOW_DOWN.arithmetic * arithmetic_s
    return memory_s + arithmetic_s + num_busy * busy_s


def sampled(cases: Sequence[StepCase], num_busy: int = 0) -> list[StepSample]:
    """Its steps as they would be measured without any noise."""
    return [
        StepSample(
            case.part.value,
            case.name,
            tuple(case.shape),
            num_busy,
            true_s(case, num_busy),
            0.01,
            9,
            case.is_held_out,
            before_s=true_s(case) if num_busy else None,
        )
        for case in cases
    ]


@functools.cache
def fitted() -> StepFit:
    """What is fitted to the made-up worker's steps."""
    return fit_steps(sampled(PLAN.alone), PLAN.row_knots)


def made_profile(fit: StepFit | None = None) -> Profile:
    """A whole profile, of `fit` or of what is fitted to the made-up worker's steps."""
    samples = sampled(PLAN.alone)
    return Profile(
        model="made-up",
        dtype="bfloat16",
        weights="auto",
        threads=1,
        block_size=16,
        kv_token_bytes=23_040,
        max_model_len=8192,
        machine={"cpu": "A processor", "packages": {"torch": "2.13.0"}},
        measured_at="2026-01-02T03:04:05+00:00",
        version="0.1.0",
        is_quick=False,
        steps=fit or fitted(),
        slow_down=TRUE_SLOW_DOWN,
        served=ServedSteps(
            1e-4, 2e-5, chunk_s=2e-3, beside_chunk_s=5e-4, busy_step_s=4e-5, busy_sequence_s=3e-5
        ),
        transfers=(TransferFit("shm", 2e-4, 1.1e-10), TransferFit("tcp", 5e-4, 9e-10)),
        overheads=Overheads(0.002, 1e-6, 3e-4, 8e-4, 1e-3),
        unsteadiness=Unsteadiness((0.9, 1.0, 1.1), (0.95, 1.05)),
        residuals=(Residuals("decode", 26, 0.01, 0.02, 0.03, -0.001, "4 sequences of 64"),),
        measurements=Measurements(tuple(samples), (), (), Noise(0.01, 0.0, 0.4, 0.02)),
        warnings=("it is made up",),
    )
