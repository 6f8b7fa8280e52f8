"""Times of any profile never fall when a step has more to do, and are never negative."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_profiles import made_profile

from twinpool.planner.profile.fit import fit_steps
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import SlowDown, StepFit, StepSample
from twinpool.planner.step_shape import StepShape

_SECONDS = st.floats(0, 1e-2)
_COUNTS = st.integers(0, 5000)


@st.composite
def _fits(draw: st.DrawFn) -> StepFit:
    knots = sorted({1, *draw(st.lists(st.integers(2, 600), min_size=1, max_size=8))})
    rises = draw(st.lists(st.one_of(st.just(0.0), _SECONDS), min_size=len(knots), max_size=len(knots)))
    times = [math.fsum(rises[: n + 1]) for n in range(len(knots))]
    tiles = [draw(st.integers(1, 40)) for _ in knots]
    return StepFit(tuple(knots), tuple(tiles), tuple(times), *(draw(st.floats(0, 1e-5)) for _ in range(7)))


_SHAPES = st.builds(StepShape, *[_COUNTS] * 6)


@settings(max_examples=150, deadline=None)
@given(
    _fits(),
    st.builds(SlowDown, *[st.floats(0, 3)] * 2) | st.none(),
    _SHAPES,
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_more_of_anything_never_takes_less(
    fit: StepFit, slow_down: SlowDown | None, shape: StepShape, field: int, num_busy: int
) -> None:
    times = FittedTimes(msgspec.structs.replace(made_profile(fit), slow_down=slow_down))
    took_s = times.step_s(shape, num_busy)
    more = shape._replace(**{shape._fields[field]: shape[field] + 1})
    assert 0 <= took_s <= times.step_s(more, num_busy)
    assert took_s <= times.step_s(shape, num_busy + 1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 900), st.floats(1e-4, 1.0)), min_size=1, max_size=30
    )
)
def test_whatever_was_measured_the_fit_never_falls(points: list[tuple[int, int, float]]) -> None:
    samples = [
        StepSample("decode", "", tuple(StepShape(batch, batch * length)), 0, seconds, 0.0, 3)
        for batch, length, seconds in points
    ]
    fit = fit_steps(samples, (1, 2, 8, 32, 64))
    assert list(fit.rows_s) == sorted(fit.rows_s)
    assert all(
        getattr(fit, name) >= 0 for name in fit.__struct_fields__ if name.endswith("_s") and name != "rows_s"
    )
