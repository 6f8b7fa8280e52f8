"""What a report leads with, and how figures are written."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.made_up_runs import GOODPUT, P99_ITL, made_up_report, made_up_run

from twinpool.bench.reports.measured import arm_of, measured
from twinpool.bench.reports.model import (
    Comparison,
    Found,
    Interval,
    MapCell,
    OutputCheck,
    Unit,
    Winner,
    decode_report,
    encode_report,
)
from twinpool.bench.reports.words import (
    Tone,
    amount,
    ends,
    headlines,
    number,
    percent,
    signed_percent,
    verdict,
)
from twinpool.bench.serving.metrics import request_metrics
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.summary import steady_state


def compared(change: Interval, measure: object = P99_ITL) -> Comparison:
    base = made_up_report().comparisons[0]
    return msgspec.structs.replace(base, change=change, measure=measure, baseline="colocated", other="1p1d")


def test_a_difference_is_told_with_its_interval_and_its_direction() -> None:
    better = verdict(compared(Interval(-0.42, -0.45, -0.38)))
    assert str(better) == "p99 ITL: 1p1d 42 % lower than colocated [38, 45]"
    assert better.tone is Tone.GAIN
    worse = verdict(compared(Interval(0.07, 0.021, 0.12)))
    assert str(worse) == "p99 ITL: 1p1d 7.0 % higher than colocated [2.1, 12]"
    assert worse.tone is Tone.LOSS
    assert verdict(compared(Interval(0.07, 0.021, 0.12), GOODPUT)).tone is Tone.GAIN


def test_an_end_that_is_not_known_is_told_as_such() -> None:
    assert str(verdict(compared(Interval(-0.42, None, -0.38)))).endswith("42 % lower than colocated [38, ∞)")
    assert str(verdict(compared(Interval(0.42, 0.38, None)))).endswith("42 % higher than colocated [38, ∞)")
    assert str(verdict(compared(Interval(0.42, -0.1, None)))).endswith(
        "no difference shown between colocated and 1p1d [−10 %, ∞)"
    )
    assert ends(Interval(3.0, None, 4.0), Unit.REQUESTS_PER_S) == "(−∞, 4.00]"


@pytest.mark.parametrize("change", [Interval(-0.3, -0.7, 0.1), Interval(-0.3), Interval(0.0, 0.0, 0.0)])
def test_without_an_interval_that_excludes_zero_no_difference_is_shown(change: Interval) -> None:
    found = verdict(compared(change))
    assert "no difference shown" in str(found)
    assert "lower" not in str(found)
    assert found.tone is Tone.EVEN


def test_what_voids_the_figures_comes_before_everything_then_outputs_that_differ_then_warnings() -> None:
    report = made_up_report()
    first, second = report.arms
    late = msgspec.structs.replace(
        second, not_a_result=("the sender was busy",), warnings=("a warm-up failed",)
    )
    differing = OutputCheck(baseline=first.name, other=second.name, num_compared=76, num_different=2)
    found = headlines(
        msgspec.structs.replace(report, arms=(first, late), output_checks=(differing,), warnings=("noisy",))
    )
    assert [each.subject for each in found[:4]] == ["not a result", "outputs differ", "warning", "warning"]
    assert str(found[1]) == "outputs differ: 2 of 76 answers of 1p1d are not those of colocated-chunked-128"
    assert all(each.tone is Tone.ALARM for each in found[:4])
    assert [each.subject for each in found[4:7]] == ["p99 ITL", "p99 TTFT", "goodput"]
    assert str(found[-1]) == report.findings[0]


def test_outputs_that_nobody_could_compare_are_not_called_the_same() -> None:
    check = OutputCheck(baseline="a", other="b", num_compared=0, num_different=0)
    report = msgspec.structs.replace(made_up_report(), output_checks=(check,))
    assert "none of a and b could be compared" in "\n".join(map(str, headlines(report)))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0421, Unit.SECONDS, "42.1 ms"),
        (0.9994, Unit.SECONDS, "999 ms"),
        (12.3456, Unit.SECONDS, "12.3 s"),
        (1234.5, Unit.SECONDS, "1,234 s"),
        (0.0, Unit.SECONDS, "0 ms"),
        (-0.0336, Unit.SECONDS, "−33.6 ms"),
        (9.504, Unit.REQUESTS_PER_S, "9.50 requests/s"),
        (0.95, Unit.SHARE, "95 %"),
        (1234, Unit.COUNT, "1,234"),
        (math.inf, Unit.SECONDS, "–"),
    ],
)
def test_figures_have_three_digits_and_their_unit(value: float, unit: Unit, text: str) -> None:
    assert amount(value, unit) == text


def test_an_interval_is_scaled_as_its_estimate() -> None:
    assert ends(Interval(0.95, 0.9, 1.1), Unit.SECONDS) == "[900, 1,100]"
    assert ends(Interval(0.95), Unit.SECONDS) == ""
    assert number(0.01234) == "0.0123"


def test_almost_all_is_never_rounded_to_all() -> None:
    assert percent(0.9999) == "99.99 %"
    assert percent(1.0) == "100 %"
    assert percent(0.031) == "3.1 %"
    assert signed_percent(-0.42) == "−42 %"
    assert signed_percent(0.0) == "0 %"


def test_a_map_cell_is_won_only_where_the_interval_excludes_one() -> None:
    def won(
        baseline: Interval, other: Interval, gain: Interval | None = None, found: Found = Found.HOLDS
    ) -> Winner:
        return MapCell(
            input_tokens=1,
            output_tokens=1,
            reuse=0,
            slo="",
            baseline_rate=baseline,
            other_rate=other,
            baseline_found=found,
            gain=gain,
        ).winner

    assert won(Interval(2), Interval(3), Interval(1.5, 1.2, 1.9)) is Winner.OTHER
    assert won(Interval(2), Interval(1), Interval(0.5, 0.3, 0.9)) is Winner.BASELINE
    assert won(Interval(2), Interval(3), Interval(1.5, 0.9, 1.9)) is Winner.NOBODY_SHOWN
    assert won(Interval(2), Interval(3), Interval(1.5)) is Winner.NOBODY_SHOWN
    fails = Interval(0, 0, 0.1)
    assert won(fails, Interval(1, 0.5, 1.5), None, Found.AT_NO_RATE) is Winner.OTHER
    assert won(fails, Interval(0.1, 0.05, 0.15), None, Found.AT_NO_RATE) is Winner.NOBODY_SHOWN
    assert won(fails, Interval(0.1, 0.05, 0.15), None, Found.NOT_KNOWN) is Winner.NOT_KNOWN
    assert won(fails, Interval(1, 0.5, 1.5), None, Found.CONTRADICTORY) is Winner.NOBODY_SHOWN


def test_a_report_is_the_same_after_it_was_saved() -> None:
    report = made_up_report()
    assert decode_report(encode_report(report)) == report


def test_another_format_and_figures_that_json_cannot_hold_are_refused() -> None:
    report = made_up_report()
    with pytest.raises(msgspec.ValidationError, match="format 2"):
        decode_report(encode_report(msgspec.structs.replace(report, format=2)))
    endless = compared(Interval(-0.4, -math.inf, math.inf))
    with pytest.raises(ValueError, match="finite"):
        encode_report(msgspec.structs.replace(report, comparisons=(endless,)))


def test_an_arm_has_the_figures_of_all_its_runs_together() -> None:
    runs = [made_up_run(seed=1), made_up_run(seed=2)]
    arm = arm_of("a", runs, Slo(ttft_s=0.3))
    figures = {figure.measure.name: figure.value.estimate for figure in arm.figures}
    ttfts = sorted(
        value
        for run in runs
        for record in run.requests
        if record.ending == "completed"
        and (value := request_metrics(record).ttft_from_intended_s) is not None
    )
    assert figures["p50 TTFT"] == ttfts[-(-len(ttfts) // 2) - 1]
    rates = [sum(r.ending == "completed" for r in run.requests) / run.duration_s for run in runs]
    assert figures["requests completed"] == pytest.approx(sum(rates) / 2)
    assert 0 < figures["goodput"] < figures["requests completed"]


def test_requests_outside_a_window_are_not_measured_and_an_interrupted_run_is_named() -> None:
    run = made_up_run()
    window = steady_state(run, 3.0)
    arm = arm_of("a", [msgspec.structs.replace(run, was_interrupted=True)], windows=[window])
    (found,) = measured([arm])
    assert len(found.requests) == len(window.measured(run.requests)) < len(run.requests)
    assert arm.warnings[0] == "interrupted"


def test_an_arm_without_requests_has_no_figures() -> None:
    empty = Run(started_at="", duration_s=1.0, requests=(), senders=(), settings={})
    assert arm_of("a", [empty]).figures == ()
    assert arm_of("a", []).figures == ()
