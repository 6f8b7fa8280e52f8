"""From runs at rates to the win-or-lose map: who holds more, and when nobody can say."""

from __future__ import annotations

import pytest

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.rate_search import Probe, Search
from twinpool.bench.comparison.sweeping import (
    Cell,
    Objective,
    Searched,
    corners,
    curve,
    doubts,
    findings,
    run_seconds,
    start_rate,
    unfinished,
    win_lose_map,
)
from twinpool.bench.comparison.yardstick import Yardstick
from twinpool.bench.reports.heat_map import words_of
from twinpool.bench.reports.model import Winner
from twinpool.bench.serving.slo import Slo

CELL = Cell(512, 64, 0.0)
YARDSTICK = Yardstick(0.001, 0.02)
(OBJECTIVE, *_) = corners(CELL, YARDSTICK)
_ALL, _NONE, _SOME = 60, 0, 54


def test_a_run_lasts_long_enough_for_a_growing_queue_to_break_the_longest_ttft() -> None:
    loosest_s = max(each.slo.ttft_s or 0.0 for each in corners(CELL, YARDSTICK))
    assert run_seconds(1.0, corners(CELL, YARDSTICK)) == 4 * loosest_s
    assert run_seconds(1000.0, corners(CELL, YARDSTICK)) == 1000.0
    assert run_seconds(10.0, [Objective("gaps only", Slo(itl_p99_s=0.05))]) == 10.0


@pytest.mark.parametrize(
    ("before", "after", "winner"),
    [
        ({1.0: _ALL, 1.15: _NONE}, {2.0: _ALL, 2.3: _NONE}, Winner.OTHER),
        ({2.0: _ALL, 2.3: _NONE}, {1.0: _ALL, 1.15: _NONE}, Winner.BASELINE),
        ({1.0: _ALL, 2.0: _NONE}, {1.5: _ALL, 3.0: _NONE}, Winner.NOBODY_SHOWN),
        ({1.0: _ALL, 2.0: _NONE}, {2.5: _ALL}, Winner.OTHER),
        ({1.0: _ALL, 2.0: _NONE}, {0.1: _NONE}, Winner.BASELINE),
        ({0.1: _NONE}, {1.0: _ALL, 2.0: _NONE}, Winner.OTHER),
        ({1.0: _NONE}, {0.5: _ALL, 0.6: _NONE}, Winner.NOT_KNOWN),
        ({1.0: _SOME}, {1.0: _SOME}, Winner.NOT_KNOWN),
        ({0.1: _NONE}, {0.1: _NONE}, Winner.NOT_KNOWN),
        ({0.03: _NONE}, {0.03: _NONE}, Winner.NOBODY_HOLDS),
        ({0.03: _NONE}, {0.5: _ALL, 0.6: _NONE}, Winner.OTHER),
        ({0.5: _NONE, 1.0: _ALL, 2.0: _NONE}, {2.0: _ALL, 2.3: _NONE}, Winner.NOBODY_SHOWN),
        ({1.0: _ALL}, {1.0: _ALL}, Winner.NOBODY_SHOWN),
    ],
)
def test_a_cell_is_won_only_where_brackets_are_apart(
    before: dict[float, int], after: dict[float, int], winner: Winner
) -> None:
    known = win_lose_map([(_searched("colocated", before), _searched("1P1D", after))])
    assert [cell.winner for cell in known.cells] == [winner]
    told = findings(known)
    assert len(told) == 1
    assert ("not known which" in told[0]) == (winner is Winner.NOT_KNOWN)
    assert ("neither 1P1D nor colocated holds" in told[0]) == (winner is Winner.NOBODY_HOLDS)
    if winner is Winner.BASELINE:
        assert told[0].startswith("1P1D loses to colocated with 512 tokens in, 64 out")


def test_what_is_not_known_is_told_apart_from_what_holds_nowhere() -> None:
    """The time was up: a search with a bracket of [0, 3.4] says nothing of the rates below."""
    known = win_lose_map([(_searched("colocated", {3.4: _NONE}), _searched("1P1D", {0.03: _NONE}))])
    assert [words_of(cell) for cell in known.cells] == [("?", "not known, none : < 3.40")]
    known = win_lose_map([(_searched("colocated", {1.0: _NONE}), _searched("1P1D", {1.6: _ALL, 2.0: _NONE}))])
    assert [words_of(cell) for cell in known.cells] == [("≥ 1.60 ×", "1.79 : < 1.00")]
    known = win_lose_map([(_searched("colocated", {1.0: _ALL, 1.1: _NONE}), _searched("1P1D", {0.5: _NONE}))])
    assert [words_of(cell) for cell in known.cells] == [("≤ 0.50 ×", "< 0.500 : 1.05")]


def test_unfinished_searches_and_contradictions_are_warned_of() -> None:
    done, open_one = _searched("colocated", {0.03: _NONE}), _searched("1P1D", {1.0: _ALL})
    assert unfinished([done, open_one]) == "1P1D (tight/tight)"
    (warning,) = doubts([[done, open_one]], 2.0)
    assert "the time was up (2 minutes) before 1 of 2 searches" in warning
    odd = _searched("1P1D", {0.5: _NONE, 1.0: _ALL, 2.0: _NONE})
    assert any("between 0.500 and 1.00 requests/s contradict" in each for each in doubts([[done, odd]], 2.0))
    assert [point.holds for point in curve(odd, OBJECTIVE).points] == [None, None, False]
    assert curve(odd, OBJECTIVE).highest_rate is None


def test_runs_at_one_rate_are_one_point_and_hold_up_to_the_bracket() -> None:
    searched = _searched("x", {1.0: _ALL, 2.0: _NONE})
    searched.probes.append(Probe(1.0, 60, {OBJECTIVE.name: 60}))
    searched.durations_s.append(60.0)
    found = curve(searched, OBJECTIVE)
    assert [(point.rate, point.attainment, point.holds) for point in found.points] == [
        (1.0, 1.0, True),
        (2.0, 0.0, False),
    ]
    assert found.points[0].goodput.estimate == pytest.approx(1.0)
    assert found.highest_rate is not None
    assert (found.highest_rate.low, found.highest_rate.high) == (1.0, 2.0)


def test_four_objectives_are_multiples_of_what_is_undisturbed() -> None:
    found = {each.name: each.slo for each in corners(CELL, YARDSTICK)}
    assert len(found) == 4
    tight, loose = found["tight TTFT, tight ITL"], found["loose TTFT, loose ITL"]
    assert (tight.ttft_s, tight.itl_p99_s) == (1.06, 0.03)
    assert (loose.ttft_s, loose.itl_p99_s) == (4.26, 0.08)


def test_a_search_starts_at_half_of_what_the_busier_pool_can_do() -> None:
    assert start_rate(Cell(512, 4, 0.0), YARDSTICK) == pytest.approx(0.5 / 0.512)
    assert start_rate(Cell(8, 600, 0.0), YARDSTICK) == pytest.approx(0.5 * 6 / (600 * 0.02))


def _searched(name: str, good: dict[float, int]) -> Searched:
    """Sixty requests at each rate, of which so many were good, one per second."""
    probes = [Probe(rate, 60, {OBJECTIVE.name: count}) for rate, count in good.items()]
    return Searched(Arm(name), CELL, [OBJECTIVE], Search(start=1.0), probes, [60.0] * len(probes))
