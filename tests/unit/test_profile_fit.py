"""The fit of a profile: what a worker with known coefficients takes is found again from its steps."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.made_profiles import PLAN, TILE, TRUE_FIT, TRUE_SLOW_DOWN, made_profile, sampled, true_s

from twinpool.planner.profile.cases import ROW_KNOTS, Part, StepCase, full_plan, quick_plan
from twinpool.planner.profile.fit import (
    far_off,
    fit_slow_down,
    fit_steps,
    fit_transfers,
    residuals_of,
    unsteadiness_of,
    wake_s_of,
)
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.nnls import nnls
from twinpool.planner.profile.saved import Residuals, StepFit, StepSample, TransferSample
from twinpool.planner.profile.step_model import StepModel
from twinpool.planner.profile.unsteady import UnsteadyTimes
from twinpool.planner.step_shape import StepShape, of_chunk, of_sequences, together

COEFFICIENTS = [name for name in StepFit.__struct_fields__ if name not in ("row_knots", "rows_s")]


def test_exact_steps_give_back_the_coefficients_they_were_made_with() -> None:
    fit = fit_steps(sampled(PLAN.alone), PLAN.row_knots)
    assert fit.row_tiles == TRUE_FIT.row_tiles
    assert fit.rows_s == pytest.approx(TRUE_FIT.rows_s, rel=1e-9)
    for name in COEFFICIENTS:
        assert getattr(fit, name) == pytest.approx(getattr(TRUE_FIT, name), rel=1e-6), name


def test_noisy_steps_give_coefficients_that_predict_unseen_ones_within_the_noise() -> None:
    random = np.random.default_rng(0)
    noisy = [
        msgspec.structs.replace(sample, seconds=sample.seconds * (1 + random.normal(0, 0.03)))
        for sample in sampled(PLAN.alone)
    ]
    model = StepModel(fit_steps(noisy, PLAN.row_knots))
    unseen = [case for case in PLAN.alone if case.is_held_out]
    assert len(unseen) >= 8
    for case in unseen:
        assert sum(model.parts(case.shape)) == pytest.approx(true_s(case), rel=0.06), case.name


def test_a_held_out_step_changes_no_coefficient() -> None:
    samples = sampled(PLAN.alone)
    wrong = [
        msgspec.structs.replace(sample, seconds=99.0) if sample.is_held_out else sample for sample in samples
    ]
    assert fit_steps(wrong, PLAN.row_knots) == fit_steps(samples, PLAN.row_knots)


def test_what_a_neighbour_costs_is_found_for_each_part() -> None:
    samples = sampled(PLAN.alone) + sampled(PLAN.busy, num_busy=1)
    found = fit_slow_down(fit_steps(samples, PLAN.row_knots), samples)
    assert found is not None
    for name in found.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUE_SLOW_DOWN, name), rel=1e-6), name


def test_without_a_neighbour_there_is_no_slow_down_and_busy_workers_share_the_cores() -> None:
    samples = sampled(PLAN.alone)
    assert fit_slow_down(fit_steps(samples, PLAN.row_knots), samples) is None
    times = FittedTimes(msgspec.structs.replace(made_profile(), slow_down=None))
    shape = of_sequences([100] * 4)
    assert times.step_s(shape, 1) == 2 * times.step_s(shape)


def test_transfers_of_a_line_give_back_the_line() -> None:
    samples = [
        TransferSample(name, size, start_s + size * byte_s, 0.0, 5)
        for name, start_s, byte_s in (("shm", 1e-4, 1e-10), ("tcp", 5e-4, 9e-10))
        for size in (368_640, 5_898_240, 23_592_960)
    ]
    shm, tcp = fit_transfers(samples)
    assert (shm.transport, tcp.transport) == ("shm", "tcp")
    assert (shm.start_s, shm.byte_s) == pytest.approx((1e-4, 1e-10))
    assert (tcp.start_s, tcp.byte_s) == pytest.approx((5e-4, 9e-10))


def test_coefficients_that_a_line_would_have_negative_are_zero() -> None:
    sizes = (1e6, 2e6, 3e6)
    falling = [TransferSample("shm", int(size), 1e-3 - size * 1e-10, 0.0, 5) for size in sizes]
    (fit,) = fit_transfers(falling)
    assert fit.byte_s == 0
    assert fit.start_s == pytest.approx(8e-4, rel=0.1)


def test_least_squares_without_a_bound_in_the_way_are_the_ordinary_ones() -> None:
    random = np.random.default_rng(1)
    a, x = random.random((30, 5)) * [1, 1e-6, 1e3, 1, 1], np.array([2, 3e5, 1e-3, 0.5, 4])
    assert nnls(a, a @ x) == pytest.approx(x, rel=1e-8)


def test_least_squares_satisfy_the_conditions_of_an_optimum_where_bounds_bind() -> None:
    """Kuhn and Tucker's: no gradient that could be followed, and none where a coefficient is free."""
    random = np.random.default_rng(2)
    for _ in range(30):
        a, b = random.normal(size=(20, 8)), random.normal(size=20)
        x = nnls(a, b)
        gradient = a.T @ (b - a @ x)
        assert (x >= 0).all()
        assert (gradient <= 1e-9).all()
        assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-9


def test_a_column_of_zeros_gets_zero() -> None:
    assert nnls(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([3.0, 6.0])).tolist() == [3.0, 0.0]


def test_residuals_are_told_by_part_with_the_worst_one_and_what_was_not_fitted_apart() -> None:
    samples = sampled(PLAN.alone)
    found = {each.part: each for each in residuals_of(samples, [], lambda s: 1.1 * s.seconds, lambda _: 0.0)}
    assert set(found) == {*Part, "shapes not fitted"}
    for each in found.values():
        assert (each.median, each.worst, each.bias) == pytest.approx((0.1, 0.1, 0.1))
        assert each.worst_case
    assert sum(each.num_points for each in found.values()) == len(samples)


def test_a_fit_that_is_far_off_is_told_and_a_good_one_is_not() -> None:
    good = Residuals("decode", 9, 0.02, 0.05, 0.09, 0.0, "8 sequences of 256")
    bad = Residuals("prompt", 9, 0.02, 0.05, 0.9, 0.0, "4 new")
    (words,) = far_off([good, bad])
    assert "prompt" in words
    assert "90%" in words
    assert "4 new" in words


def test_a_step_between_measured_batches_lies_between_them_and_one_beyond_goes_on() -> None:
    model = StepModel(TRUE_FIT)

    def products_s(rows: int) -> float:
        return model.parts(StepShape(prompt_tokens=rows)).arithmetic_s

    for low, high in zip(PLAN.row_knots, PLAN.row_knots[1:], strict=False):
        assert products_s(low) <= products_s((low + high) // 2) <= products_s(high)
    last = PLAN.row_knots[-1]
    assert products_s(2 * last) - products_s(last) == pytest.approx(4e-4 * last, rel=0.01)


def test_rows_count_as_whole_tiles_and_what_is_on_both_sides_costs_more() -> None:
    model = StepModel(TRUE_FIT)
    assert model.parts(of_chunk(65))[1] - model.parts(of_chunk(64))[1] == pytest.approx(TILE * 4e-4, rel=0.01)
    assert model.parts(StepShape(prompt_tokens=70)) == model.parts(StepShape(prompt_tokens=96))
    both, prompt = StepShape(2, 0, 1, 30), StepShape(0, 0, 1, 32)
    more_s = sum(model.parts(both)) - sum(model.parts(prompt))
    assert more_s == pytest.approx(
        TRUE_FIT.both_s + 2 * (TRUE_FIT.beside_sequence_s + TRUE_FIT.sequence_s), rel=1e-9
    )


def test_what_a_step_takes_longer_after_a_sleep_is_told_alone_and_beside_a_neighbour() -> None:
    def slept(num_busy: int, longer_s: float) -> list[StepSample]:
        samples = sampled(PLAN.sleeping, num_busy)
        return [
            msgspec.structs.replace(
                each, before_s=each.seconds, seconds=each.seconds + longer_s, has_slept=True
            )
            for each in samples
        ]

    samples = sampled(PLAN.alone) + sampled(PLAN.busy, num_busy=1)
    every = [*samples, *slept(0, 0.003), *slept(1, 0.025)]
    assert wake_s_of(every) == pytest.approx((0.003, 0.022))
    assert wake_s_of(samples) == (0.0, 0.0)
    assert wake_s_of(slept(0, 0.003)) == pytest.approx((0.003, 0.0))
    assert wake_s_of(slept(0, -0.003) + slept(1, -0.001)) == (0.0, 0.0)
    fit = fit_steps(samples, PLAN.row_knots)
    assert fit_steps(every, PLAN.row_knots) == fit
    assert fit_slow_down(fit, every) == fit_slow_down(fit, samples)


def test_how_unsteady_steps_are_is_told_as_factors_with_a_mean_of_one() -> None:
    decode, *_, prompt = sampled(PLAN.alone)[:1] + [s for s in sampled(PLAN.alone) if s.part == Part.PROMPT]
    unsteady = [
        msgspec.structs.replace(decode, each_s=tuple(decode.seconds * f for f in (0.8, 0.8, 0.8, 1.6))),
        msgspec.structs.replace(prompt, each_s=(prompt.seconds,) * 4),
    ]
    found = unsteadiness_of(unsteady)
    assert np.mean(found.decode) == pytest.approx(1)
    assert found.decode[0] == pytest.approx(0.8, rel=0.02)
    assert found.decode[-1] == pytest.approx(1.6, rel=0.02)
    assert set(found.prompt) == {1.0}
    assert unsteadiness_of([]).decode == (1.0,)


def test_unsteady_times_have_the_mean_of_the_steady_ones_and_are_the_same_each_time() -> None:
    steady = FittedTimes(made_profile())
    unsteady, other = UnsteadyTimes(steady, 1), UnsteadyTimes(steady, 2)
    shapes = [of_sequences([100 + n] * 4) for n in range(2000)]
    ratios = [unsteady.step_s(shape) / steady.step_s(shape) for shape in shapes]
    assert np.mean(ratios) == pytest.approx(1, rel=0.01)
    assert {round(ratio, 6) for ratio in ratios} == {0.9, 1.0, 1.1}
    again = UnsteadyTimes(steady, 1)
    assert ratios == [again.step_s(shape) / steady.step_s(shape) for shape in shapes]
    assert ratios != [other.step_s(shape) / steady.step_s(shape) for shape in shapes]
    assert unsteady.transfer_s(1000) == steady.transfer_s(1000)
    assert unsteady.overheads == steady.overheads


def test_an_unsteady_step_keeps_its_factor_while_it_runs_and_the_next_of_its_shape_has_its_own() -> None:
    steady = FittedTimes(made_profile())
    unsteady, prompt = UnsteadyTimes(steady, 1), of_chunk(96, 384)
    factors = []
    for length in range(0, 2000, 10):
        factors.append(unsteady.step_s(prompt) / steady.step_s(prompt))
        unsteady.step_s(of_sequences([200 + length]))
        assert unsteady.step_s(prompt, 1) / steady.step_s(prompt, 1) == pytest.approx(factors[-1])
        for later in range(5):
            unsteady.step_s(of_sequences([201 + length + later]))
    assert {round(factor, 6) for factor in factors} == {0.95, 1.05}
    assert np.mean(factors) == pytest.approx(1, abs=0.02)


def test_plans_hold_only_what_the_context_holds_and_always_the_parts() -> None:
    for plan in (full_plan(8192), quick_plan(8192), full_plan(2048), quick_plan(300)):
        assert plan.row_knots == tuple(rows for rows in ROW_KNOTS if rows <= plan.row_knots[-1])
        assert {case.part for case in plan.alone} >= {Part.DECODE, Part.PROMPT, Part.MIXED}
    assert all(case.longest <= 300 for case in quick_plan(300).alone)


def test_a_case_has_the_shape_of_its_pieces() -> None:
    case = StepCase(Part.MIXED, (100, 50), ((30, 0), (20, 64)))
    assert case.shape == together(of_sequences([100, 50]), of_chunk(30), of_chunk(20, 64))
    assert [(piece.start, piece.count) for piece in case.pieces] == [(99, 1), (49, 1), (0, 30), (64, 20)]
    assert case.pool_tokens == 112 + 64 + 32 + 96
