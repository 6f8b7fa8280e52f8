"""Whether two arms differ: intervals that cover what they should, and verdicts that follow from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import pytest

from twinpool.bench.comparison.draws import Statistic, drawn, median_of, once_each, percentile_of, sum_of
from twinpool.bench.comparison.statistics import (
    Repetition,
    Scale,
    Verdict,
    compare,
    difference,
    estimate,
    log_ratio,
    student_quantile,
)
from twinpool.bench.serving.distributions import percentile


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        # Tables of Student's t.
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.995, 4, 4.6041),
        (0.95, 10, 1.8125),
        (0.975, 120, 1.9799),
        (0.025, 3, -3.1824),
        (0.5, 7, 0.0),
    ],
)
def test_students_quantile_is_that_of_the_tables(probability: float, degrees: int, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, abs=5e-5)


def test_a_difference_larger_than_all_noise_is_shown_with_its_size() -> None:
    found = compare(_repetitions(5, other=0.5), log_ratio(_mean), Scale.RATIO)
    assert found.verdict is Verdict.LOWER
    assert found.low < 0.5 < found.high < 0.6
    assert compare(_repetitions(5, other=2.0), log_ratio(_mean), Scale.RATIO).verdict is Verdict.HIGHER


def test_a_difference_in_absolute_terms_has_the_unit_of_the_measure() -> None:
    found = compare(_repetitions(6, other=3.0), difference(_mean), Scale.DIFFERENCE)
    assert found.verdict is Verdict.HIGHER
    assert found.low < 2.0 < found.high
    assert found.half_width == pytest.approx((found.high - found.low) / 2)


@pytest.mark.parametrize("percent", [0, 25, 50, 90, 99, 100])
def test_a_percentile_of_draws_is_that_of_the_lists_that_they_stand_for(percent: float) -> None:
    rng = np.random.default_rng(percent)
    values = [rng.lognormal(size=rng.integers(0, 5)).tolist() for _ in range(12)]
    draws = drawn(12, 50, rng)
    found = percentile_of(values, percent)(draws)
    for draw, value in zip(draws, found, strict=True):
        stood_for = [each for times, own in zip(draw, values, strict=True) for each in own * int(times)]
        assert value == percentile(stood_for, percent)


def test_a_median_of_draws_leaves_out_requests_without_a_value_and_is_the_mean_of_the_middle_two() -> None:
    values = [3.0, None, 1.0, 7.0, 5.0]
    assert median_of(values)(once_each(5)) == [4.0]
    draws = drawn(5, 50, np.random.default_rng(1))
    for draw, value in zip(draws, median_of(values)(draws), strict=True):
        known = [
            each for times, each in zip(draw, values, strict=True) if each is not None for _ in range(times)
        ]
        assert value == pytest.approx(median(known))


def test_a_draw_without_any_value_has_no_figure() -> None:
    assert np.isnan(percentile_of([[], []], 99)(once_each(2))).all()
    assert np.isnan(median_of([None, 1.0])(np.array([[2, 0]], np.int32))).all()


def test_draws_are_of_as_many_requests_as_there_are() -> None:
    draws = drawn(7, 100, np.random.default_rng(1))
    assert (draws.sum(axis=1) == 7).all()
    assert len(np.unique(draws, axis=0)) > 50
    assert sum_of([1.0] * 7)(draws) == pytest.approx(7.0)


def test_per_request_differences_leave_out_what_one_arm_did_not_answer() -> None:
    def paired(baseline: Sequence[float | None], other: Sequence[float | None]) -> Statistic:
        pairs = zip(baseline, other, strict=True)
        return median_of([None if one is None or same is None else same - one for one, same in pairs])

    repetitions = [Repetition([1.0, 2.0, None], [1.5, 2.5, 9.0]), Repetition([4.0, None], [4.5, 1.0])]
    found = compare(repetitions, paired, Scale.DIFFERENCE)
    assert found.value == pytest.approx(0.5)


def test_an_arms_own_figure_has_the_wider_of_both_intervals() -> None:
    even, uneven = [[1.0, 2.0, 3.0]] * 4, [[1.0], [1.0], [2.0], [2.0]]
    found = estimate(even, _mean)
    assert found.value == pytest.approx(2.0)
    assert found.low < 1.8, "which requests came: the bootstrap"
    assert found.high > 2.2
    found = estimate(uneven, _mean)
    assert (found.low, found.high) == pytest.approx((1.5 - 0.9187, 1.5 + 0.9187), abs=1e-3)
    assert estimate([[1.0, 2.0]], _mean).high == math.inf


def test_the_same_arm_twice_shows_no_difference_in_at_least_95_of_100_comparisons() -> None:
    """Runs differ by 5 % as a whole, requests by 30 %: no difference, and five measures that all must say so."""
    shown = 0
    for trial in range(100):
        repetitions = _repetitions(4, other=1.0, seed=trial, run_noise=0.05)
        measures = [_mean, *(_percentile(percent) for percent in (0, 50, 90, 100))]
        differences = [
            compare(repetitions, log_ratio(measure), Scale.RATIO, num_measures=5, num_resamples=40)
            for measure in measures
        ]
        shown += any(found.verdict is not Verdict.NOT_SHOWN for found in differences)
    assert shown <= 5


def test_more_repetitions_narrow_the_interval() -> None:
    few, many = (compare(_repetitions(count, other=1.0), log_ratio(_mean), Scale.RATIO) for count in (3, 12))
    assert many.half_width < few.half_width


def test_one_repetition_shows_nothing() -> None:
    found = compare(_repetitions(1, other=0.1), log_ratio(_mean), Scale.RATIO)
    assert found.value == pytest.approx(0.1, rel=0.2)
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.verdict is Verdict.NOT_SHOWN


def test_a_value_without_a_ratio_shows_nothing() -> None:
    repetitions = [Repetition([0.0], [1.0]), Repetition([1.0], [1.0])]
    found = compare(repetitions, log_ratio(_mean), Scale.RATIO)
    assert math.isnan(found.value)
    assert found.verdict is Verdict.NOT_SHOWN
    assert found.half_width == math.inf


def test_measures_that_are_compared_together_need_wider_intervals() -> None:
    alone, of_ten = (
        compare(_repetitions(5, other=1.0), log_ratio(_mean), Scale.RATIO, num_measures=number)
        for number in (1, 10)
    )
    assert (alone.level, of_ten.level) == (pytest.approx(0.95), pytest.approx(0.995))
    assert of_ten.half_width > alone.half_width


def test_the_same_seed_gives_the_same_interval() -> None:
    repetitions = _repetitions(4, other=1.1)
    assert compare(repetitions, log_ratio(_mean), Scale.RATIO, seed=3) == compare(
        repetitions, log_ratio(_mean), Scale.RATIO, seed=3
    )


def test_requests_without_a_partner_are_an_error() -> None:
    with pytest.raises(ValueError, match="wanted: pairs"):
        compare([Repetition([1.0, 2.0], [1.0])], log_ratio(_mean), Scale.RATIO)
    with pytest.raises(ValueError, match="at least one"):
        compare([], log_ratio(_mean), Scale.RATIO)


def _repetitions(
    count: int, other: float, seed: int = 1, run_noise: float = 0.02, size: int = 40
) -> list[Repetition[float]]:
    """Requests of about 1 second on the baseline, and of `other` times as much on the other arm."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        requests = [rng.lognormvariate(0, 0.3) for _ in range(size)]
        runs = [rng.lognormvariate(0, run_noise) for _ in range(2)]
        baseline, changed = (
            [request * run * rng.lognormvariate(0, 0.1) for request in requests] for run in runs
        )
        made.append(Repetition(baseline, [value * other for value in changed]))
    return made


def _mean(values: Sequence[float]) -> Statistic:
    return sum_of([value / len(values) for value in values])


def _percentile(percent: float) -> Callable[[Sequence[float]], Statistic]:
    return lambda values: percentile_of([[value] for value in values], percent)
