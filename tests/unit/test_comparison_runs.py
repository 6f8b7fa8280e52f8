"""How arms are repeated, tuned and told apart: on made runs, without a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from twinpool.bench.comparison.arms import Arm, parse_arm
from twinpool.bench.comparison.measures import (
    COMPARISONS,
    FIGURES,
    GOODPUT,
    P99_ITL,
    comparisons,
    figures,
    goodput_of_nothing,
    seen,
)
from twinpool.bench.comparison.noise import Noise, Pace, noise_table, noise_warnings
from twinpool.bench.comparison.outputs import check_outputs
from twinpool.bench.comparison.plan import Trials, forecast, lasts_s, order, repeat
from twinpool.bench.comparison.scenarios import Customer, Served, Story, conclusions, table
from twinpool.bench.comparison.stand import Trial
from twinpool.bench.comparison.tuning import Tried, best, tune, tuning_table
from twinpool.bench.comparison.workloads import Load, merged
from twinpool.bench.comparison.yardstick import Yardstick
from twinpool.bench.reports.model import Verdict
from twinpool.bench.serving.record import Chunk, Ending, RequestRecord, Run, TokenCount
from twinpool.bench.serving.slo import Slo
from twinpool.bench.serving.workload import PlannedRequest

SLO = Slo(ttft_s=0.5, itl_p99_s=0.1)
FAST, SLOW = parse_arm("1p1d", 2048), parse_arm("colocated-chunked-128", 2048)
THIRD = parse_arm("hybrid", 2048)
QUIET = Noise(0.0, 0.0, 0.0, Pace(10.0, 1.0))


def test_every_arm_has_every_place_in_turn_and_pairs_go_forth_and_back() -> None:
    arms = [FAST, SLOW, THIRD]
    orders = [[arm.name for arm in order(arms, repetition)] for repetition in range(6)]
    for place in range(3):
        assert sorted(names[place] for names in orders) == sorted(2 * [arm.name for arm in arms])
    assert orders[1] == orders[0][::-1]


def test_all_arms_get_the_same_requests_and_each_repetition_others() -> None:
    sent: dict[tuple[str, str], list[int]] = {}

    def run(arm: Arm, requests: Sequence[PlannedRequest], slot: str) -> Trial:
        sent[slot, arm.name] = [request.input_tokens for request in requests]
        return _trial(arm, 0.02)

    trials = _repeated(run, most=2)
    assert trials.num_repetitions == 2
    assert sent["made-0", SLOW.name] == sent["made-0", FAST.name]
    assert sent["made-1", SLOW.name] != sent["made-0", SLOW.name]


def test_repetitions_end_when_the_interval_is_tight() -> None:
    trials = _repeated(_steady, most=50)
    assert 3 <= trials.num_repetitions < 10


def test_repetitions_end_before_the_time_is_up() -> None:
    now = [0.0]

    def run(arm: Arm, requests: Sequence[PlannedRequest], slot: str) -> Trial:
        now[0] += 10.0
        return _noisy(arm, requests, slot)

    trials = Trials(_load(), (SLOW, FAST))
    repeat(trials, run, seed=1, most=50, until=70.0, clock=lambda: now[0])
    assert (trials.num_repetitions, now[0]) == (3, 60.0)


def test_what_was_interrupted_does_not_count_and_is_the_last() -> None:
    calls = [0]

    def run(arm: Arm, requests: Sequence[PlannedRequest], slot: str) -> Trial:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return _noisy(arm, requests, slot)

    trials = Trials(_load(), (SLOW, FAST))
    with pytest.raises(KeyboardInterrupt):
        repeat(trials, run, seed=1, most=50, until=math.inf)
    assert (trials.num_repetitions, calls[0]) == (1, 4)
    assert [len(trials.runs(arm)) for arm in (SLOW, FAST)] == [1, 1]


def test_a_comparison_has_a_row_for_each_measure_and_shows_what_is_clear() -> None:
    trials = _repeated(_steady, most=4)
    rows = comparisons(SLOW.name, FAST.name, trials.pairs(FAST), SLO)
    assert [row.measure for row in rows] == [compared.measured.measure for compared in COMPARISONS]
    (p99,) = [row for row in rows if row.measure == P99_ITL.measure]
    assert p99.verdict is Verdict.LOWER
    assert p99.change.estimate == pytest.approx(-0.5, abs=0.02)
    assert p99.baseline_value.estimate == pytest.approx(0.04, rel=0.05)


def test_an_arm_has_figures_of_its_own_with_intervals() -> None:
    found = figures([_run(0.02), _run(0.03)], SLO)
    assert [figure.measure for figure in found] == [each.measure for each in FIGURES]
    by_name = {figure.measure.name: figure.value for figure in found}
    assert by_name["p99 ITL"].estimate == pytest.approx(0.025)
    assert by_name["p50 TTFT"].estimate == pytest.approx(0.125)
    assert by_name["goodput"].estimate == pytest.approx(1.2)
    assert by_name["output tokens"].estimate == pytest.approx(4.8)
    steady = figures([_run(0.020), _run(0.021), _run(0.022)], SLO)
    low, high = next(
        (v.low, v.high) for m, v in ((s.measure.name, s.value) for s in steady) if m == "p99 ITL"
    )
    assert low is not None
    assert high is not None
    assert 0 <= low < 0.021 < high


def test_a_figure_that_a_repetition_lacks_is_left_out() -> None:
    failed = _of([_record(0, 0.02, output="", ending=Ending.FAILED)])
    names = [figure.measure.name for figure in figures([_run(0.02), failed], SLO)]
    assert names == ["goodput", "requests completed", "output tokens"]


def test_a_goodput_of_nothing_has_no_ratio_and_is_told_in_a_sentence() -> None:
    pairs = [(_run(0.2), _run(0.02)), (_run(0.2), _run(0.02))]
    assert GOODPUT.of(seen(pairs[0][0], SLO)) == 0.0
    assert GOODPUT.measure not in [row.measure for row in comparisons("a", "b", pairs, SLO)]
    told = goodput_of_nothing("a", "b", pairs, SLO)
    assert "a had a repetition without any: b − a is +1.2 [" in told
    assert goodput_of_nothing("b", "b", [(_run(0.02), _run(0.02))], SLO) == ""
    assert "no request of a or b met" in goodput_of_nothing("a", "b", [(_run(0.2), _run(0.2))], SLO)


def test_noise_is_told_by_arm_and_warned_of_when_others_work() -> None:
    busy = Noise(others_share=0.3, stolen_share=0.0, load_average=1.0, pace=Pace(10.0, 1.0))
    found = noise_table({"x": [QUIET, busy], "y": [QUIET]})
    assert [row[:3] for row in found.rows] == [("x", "15", "30"), ("y", "0", "0")]
    assert noise_warnings({"y": [QUIET]}) == []
    (warning,) = noise_warnings({"x": [QUIET, busy], "y": [QUIET]})
    assert "up to 30%" in warning


def test_the_best_budget_has_the_lowest_gaps_among_those_with_about_the_best_goodput() -> None:
    tried = [
        Tried(SLOW, budget, goodput, p99)
        for budget, goodput, p99 in ((64, 1.0, 0.02), (128, 1.95, 0.05), (256, 2.0, 0.08))
    ]
    assert best(tried).token_budget == 128
    assert best([Tried(SLOW, 64, 0.0, math.nan), Tried(SLOW, 128, 0.0, 0.3)]).token_budget == 128


def test_tuning_tries_each_budget_once_on_the_same_load() -> None:
    asked: list[str] = []

    def try_out(arm: Arm) -> Trial:
        asked.append(arm.name)
        return _trial(arm, 0.02 if arm.name.endswith("-96") else 0.04)

    chosen, tried = tune(parse_arm("colocated-chunked", 2048), SLO, try_out, budgets=(32, 96))
    assert asked == ["colocated-chunked-32", "colocated-chunked-96"]
    assert (chosen.name, len(tried)) == ("colocated-chunked-96", 2)
    (found,) = tuning_table(tried)
    assert [row[0] for row in found.rows] == asked
    assert tuning_table([]) == ()


def test_answers_are_compared_where_both_arms_completed() -> None:
    same, other = _record(0, 0.02, output="the same"), _record(0, 0.02, output="the other")
    failed = _record(1, 0.02, output="", ending=Ending.FAILED)
    whole = _record(1, 0.02, output="whole")
    check = check_outputs("a", "b", [(_of([same, failed]), _of([other, whole]))])
    assert (check.num_compared, check.num_different) == (1, 1)
    (difference,) = check.differences
    assert (difference.first_difference, difference.baseline_output) == (4, "the same")


def test_a_story_says_whose_wait_grew() -> None:
    customer = Customer("A", 200, 4)
    undisturbed, stalled = _record(0, 0.02), _record(0, 0.02, stall_s=0.3)
    same = Served("1P1D", customer, 3 * (undisturbed,), 3 * (undisturbed,))
    assert same.whose_wait_grew == "no"
    assert conclusions(Story(FAST, (same,), ())) == ["1P1D: nobody's wait grew"]
    grown = Served("1P1D", customer, 3 * (undisturbed,), 3 * (stalled,))
    assert grown.whose_wait_grew == "a gap"
    (row,) = table(Story(FAST, (grown,), ())).rows
    assert (row[0], row[-1]) == ("A", "a gap")
    assert "320 (20.0)" in row
    assert conclusions(Story(FAST, (grown,), ())) == [
        "1P1D: the longest gap of A (200 tokens in) is 320 ms, alone 20.0 ms"
    ]


def test_a_wait_that_was_as_long_alone_once_has_not_grown() -> None:
    quick, slow = _record(0, 0.02), _record(0, 0.02, stall_s=0.3)
    told = Served("x", Customer("A", 200, 4), (quick, quick, slow), (slow, slow, slow))
    assert told.whose_wait_grew == "no"


def test_it_is_said_beforehand_whether_the_time_will_do() -> None:
    assert forecast(10.0, 60.0, 12, 90.0).endswith("so about 6 will be made in 60 s")
    few = forecast(25.0, 60.0, 12, 95.0)
    assert "about 2 will be made" in few
    assert few.endswith("for 3 give --minutes 2")
    assert "longer than the 20 s that are left" in forecast(25.0, 20.0, 12, 95.0)
    assert "--minutes" not in forecast(25.0, 60.0, 1, 95.0), "no more was asked for"
    by = Yardstick(prompt_token_s=0.001, itl_s=0.02)
    assert lasts_s([_planned(100, 0.0), _planned(100, 5.0)], by) == pytest.approx(5.0 + 1.25 * (0.1 + 0.08))


def test_a_figure_that_is_not_known_within_its_own_size_has_no_interval() -> None:
    by_name = {each.measure.name: each.value for each in figures([_run(0.02), _run(0.1)], SLO)}
    assert by_name["p50 TTFT"].estimate == pytest.approx(0.3)
    assert (by_name["p50 TTFT"].low, by_name["p50 TTFT"].high) == (None, None)


def test_groups_are_one_load_in_the_order_of_their_times() -> None:
    groups = {"a": [_planned(1, 0.5), _planned(2, 1.5)], "b": [_planned(3, 1.0)]}
    requests = merged(groups)
    assert [(request.index, request.group, request.input_tokens) for request in requests] == [
        (0, "a", 1),
        (1, "b", 3),
        (2, "a", 2),
    ]


def _repeated(run: Callable[[Arm, Sequence[PlannedRequest], str], Trial], most: int) -> Trials:
    trials = Trials(_load(), (SLOW, FAST))
    repeat(trials, run, seed=1, most=most, until=math.inf)
    return trials


def _load() -> Load:
    def requests(seed: int) -> list[PlannedRequest]:
        return [_planned(seed + number, float(number)) for number in range(12)]

    return Load("made", "of nothing", requests, SLO)


def _planned(tokens: int, at_s: float) -> PlannedRequest:
    return PlannedRequest(index=0, prompt="x", input_tokens=tokens, output_tokens=4, at_s=at_s)


def _steady(arm: Arm, _requests: Sequence[PlannedRequest], slot: str) -> Trial:
    """Runs that differ by a thousandth."""
    return _trial(arm, (0.02 if arm is FAST else 0.04) * (1 + 0.001 * (len(slot) + int(slot[-1]))))


def _noisy(arm: Arm, _requests: Sequence[PlannedRequest], slot: str) -> Trial:
    return _trial(arm, 0.02 * (1 + 0.5 * (int(slot[-1]) % 2)) if arm is FAST else 0.03)


def _trial(arm: Arm, gap_s: float) -> Trial:
    return Trial(arm, _run(gap_s), QUIET)


def _run(gap_s: float) -> Run:
    return _of([_record(index, gap_s) for index in range(12)])


def _of(records: Sequence[RequestRecord]) -> Run:
    return Run(
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=10.0,
        requests=tuple(records),
        senders=(),
        settings={},
    )


def _record(
    index: int, gap_s: float, *, output: str = "text", ending: Ending = Ending.COMPLETED, stall_s: float = 0.0
) -> RequestRecord:
    """Four tokens `gap_s` apart after a TTFT of 5 gaps; a stall comes before the last one."""
    sent = float(index)
    at: Callable[[int], float] = lambda number: sent + (5 + number) * gap_s + (stall_s if number == 3 else 0)  # noqa: E731
    return RequestRecord(
        index=index,
        request_id=f"r{index}",
        group="",
        intended_at_s=sent,
        sent_at_s=sent,
        ended_at_s=at(3),
        ending=ending,
        input_tokens=200,
        wanted_output_tokens=4,
        output_tokens=4,
        chunks=tuple(Chunk(at(number), 1) for number in range(4)),
        token_count=TokenCount.IDS,
        finish_reason="length",
        output_digest=output,
        output=output,
    )
