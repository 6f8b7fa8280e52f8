"""Scales of charts, and the curves that are drawn on them."""

from __future__ import annotations

import random

import pytest

from twinpool.bench.reports.axes import ecdf, linear_axis, log_axis, probability_axis, steps
from twinpool.bench.reports.charts import MARKED, Series, distribution_chart, tick
from twinpool.bench.serving.distributions import percentile


def test_few_values_are_all_points_of_their_curve() -> None:
    assert ecdf([3.0, 1.0, 2.0, 2.0]) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    assert ecdf([]) == []


@pytest.mark.parametrize("values", [[1.0, 2.0, 10.0], [5.0], [0.1, 0.1, 0.4, 0.9, 1.3, 1.7]])
def test_every_percentile_by_nearest_rank_lies_on_the_stepped_curve(values: list[float]) -> None:
    corners = steps(ecdf(values))
    assert corners[0] == (min(values), 0.0)
    for level in MARKED:
        at = percentile(values, level)
        shares = [share for value, share in corners if value == at]
        assert min(shares) <= level / 100 <= max(shares)


def test_a_thinned_curve_lies_on_the_whole_one_and_keeps_both_tails() -> None:
    chance = random.Random(1)
    values = [chance.lognormvariate(-4, 0.5) for _ in range(50_000)]
    points = ecdf(values, most=300)
    ordered = sorted(values)
    assert len(points) <= 302
    assert points[0][0] == ordered[0]
    assert points[-1] == (ordered[-1], 1.0)
    for value, share in points:
        assert ordered[round(share * len(values)) - 1] == value
    assert sum(share > 0.999 for _, share in points) >= 10, "the tail is not thinned away"


@pytest.mark.parametrize("high", [0.003, 0.9, 1.0, 7.0, 8.0, 120.0])
def test_a_linear_axis_has_a_few_round_ticks_and_reaches_its_highest_value(high: float) -> None:
    axis = linear_axis(high, "{:g}".format)
    assert 3 <= len(axis.ticks) <= 12
    assert axis.ticks[0] == (0.0, "0")
    assert axis.ticks[-1][0] >= high * (1 - 1e-9)
    assert axis.place(0) == 0.0
    assert axis.place(axis.ticks[-1][0]) == pytest.approx(1.0)
    assert all(len(label) <= 7 for _, label in axis.ticks)


@pytest.mark.parametrize(("low", "high"), [(0.01, 0.01), (0.018, 0.15), (1e-6, 1000.0)])
def test_a_logarithmic_axis_holds_its_values_and_has_ticks(low: float, high: float) -> None:
    axis = log_axis(low, high, tick)
    assert 0 < axis.place(low) <= axis.place(high) < 1
    assert axis.ticks
    assert axis.place(0.0) == 0.0


def test_both_tails_of_a_probability_axis_are_as_wide() -> None:
    axis = probability_axis(10_000)
    assert axis.place(0.5) == pytest.approx(0.5)
    assert axis.place(0.99) - axis.place(0.9) == pytest.approx(axis.place(0.1) - axis.place(0.01))
    assert [label for _, label in axis.ticks][-2:] == ["99.9 %", "99.99 %"]
    assert [label for _, label in probability_axis(20).ticks] == ["10 %", "50 %", "90 %"]


def test_without_a_value_above_zero_there_is_no_chart() -> None:
    assert distribution_chart("ITL", [Series("a", 0, [])]) is None
    assert distribution_chart("ITL", [Series("a", 0, [0.0, 0.0])]) is None
    drawn = distribution_chart("ITL", [Series("a", 0, [0.0, 0.02, 0.02]), Series("none", 1, [])])
    assert drawn is not None
    assert "a: p50 20.0 ms" in drawn
