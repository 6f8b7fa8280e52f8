"""The search for the highest rate: it ends, finds the border of a made server, and says when it is not sure."""

from __future__ import annotations

import math
import random

import pytest

from twinpool.bench.comparison.rate_search import Bracket, Holds, Probe, Search, wilson
from twinpool.bench.reports.model import Found


@pytest.mark.parametrize(("good", "total"), [(8, 10), (1, 20), (49, 50), (300, 400)])
def test_wilsons_ends_are_the_shares_that_lie_just_so_far_from_what_was_seen(good: int, total: int) -> None:
    """At either end p, the seen share is z standard deviations of a share p away: 1.959964 of them at 95 %."""
    for end in wilson(good, total, 0.95):
        assert abs(good / total - end) / math.sqrt(end * (1 - end) / total) == pytest.approx(1.959964)


def test_wilsons_interval_of_all_or_none_reaches_the_end() -> None:
    assert wilson(50, 50, 0.95)[1] == 1.0
    assert wilson(0, 50, 0.95)[0] == 0.0
    assert wilson(0, 0, 0.95) == (0.0, 1.0)


@pytest.mark.parametrize("border", [0.3, 1.0, 2.7, 14.0])
def test_the_border_of_a_server_that_breaks_down_is_found_within_the_resolution(border: float) -> None:
    search = Search(start=1.0)
    probes = _run(search, {"slo": lambda rate: 1.0 if rate <= border else 0.3})
    bracket = search.bracket(probes, "slo")
    assert bracket.low <= border < bracket.high
    assert bracket.width <= search.resolution
    assert len(probes) <= 16


def test_runs_of_one_objective_serve_the_others() -> None:
    search = Search(start=1.0)
    shares = {
        "tight": lambda rate: 1.0 if rate <= 1.2 else 0.2,
        "loose": lambda rate: 1.0 if rate <= 4.0 else 0.2,
    }
    together = _run(search, shares)
    apart = sum(len(_run(search, {name: share})) for name, share in shares.items())
    for name, border in (("tight", 1.2), ("loose", 4.0)):
        bracket = search.bracket(together, name)
        assert bracket.low <= border < bracket.high
    assert len(together) < apart


def test_an_objective_that_never_holds_ends_the_search_with_no_rate() -> None:
    search = Search(start=1.0)
    probes = _run(search, {"slo": lambda _rate: 0.0})
    assert search.bracket(probes, "slo") == Bracket(0.0, pytest.approx(min(p.rate for p in probes)))
    assert len(probes) <= 6


def test_a_server_that_is_never_overloaded_ends_the_search_too() -> None:
    search = Search(start=1.0)
    probes = _run(search, {"slo": lambda _rate: 1.0})
    bracket = search.bracket(probes, "slo")
    assert math.isinf(bracket.high)
    assert bracket.low > 10


@pytest.mark.parametrize("seed", range(20))
def test_a_server_that_gives_way_slowly_and_by_chance_leaves_a_bracket_around_its_border(seed: int) -> None:
    """The share of good requests falls from 1 to 0 between 1 and 4 requests/s; it is 0.9 at 1.3."""
    search = Search(start=0.8)
    rng = random.Random(seed)
    probes: list[Probe] = []
    while (rate := search.next_rate(probes, ["slo"])) is not None:
        share = min(1.0, max(0.0, (4 - rate) / 3))
        probes.append(Probe(rate, 60, {"slo": sum(rng.random() < share for _ in range(60))}))
        assert len(probes) < 40, "it ends"
    bracket = search.bracket(probes, "slo")
    assert bracket.low < 1.6
    assert bracket.high > 1.15


def test_an_unsure_rate_is_tried_again_and_its_runs_count_together() -> None:
    search = Search(start=1.0, tries=3)
    once = [Probe(1.0, 30, {"slo": 27})]
    assert search.holds(once, "slo") is Holds.UNSURE
    assert search.next_rate(once, ["slo"]) == 1.0
    assert search.holds([*once, Probe(1.0, 300, {"slo": 290})], "slo") is Holds.YES
    assert search.holds([*once, Probe(1.0, 300, {"slo": 240})], "slo") is Holds.NO


def test_a_fluke_above_a_rate_that_fails_does_not_count() -> None:
    """What fails below what holds is tried again; then the runs of both count together."""
    search = Search(start=1.0)
    probes = [Probe(rate, 60, {"slo": good}) for rate, good in ((1.0, 60), (2.0, 10), (3.0, 60))]
    assert search.bracket(probes, "slo") == Bracket(1.0, math.inf)
    assert search.next_rate(probes, ["slo"]) == 2.0
    probes += 2 * [Probe(2.0, 60, {"slo": 10}), Probe(3.0, 60, {"slo": 10})]
    assert search.bracket(probes, "slo") == Bracket(1.0, 2.0)


def test_one_disturbed_run_at_a_low_rate_does_not_outweigh_the_rates_that_held_above_it() -> None:
    """It is tried again first, and what was disturbed is then one run among many."""
    search = Search(start=3.4)
    probes = [
        Probe(rate, 32, {"slo": good}) for rate, good in ((3.4, 32), (1.33, 31), (0.519, 22), (5.45, 10))
    ]
    assert search.bracket(probes, "slo") == Bracket(0.0, 5.45)
    assert search.found(probes, "slo") is Found.CONTRADICTORY
    tried = []
    while (rate := search.next_rate(probes, ["slo"])) is not None and rate in (3.4, 1.33, 0.519):
        tried.append(rate)
        probes.append(Probe(rate, 32, {"slo": 32}))
    assert tried[0] == 0.519
    assert max(tried.count(each) for each in tried) < search.tries
    assert search.bracket(probes, "slo") == Bracket(3.4, 5.45)
    assert search.found(probes, "slo") is Found.HOLDS


def test_a_share_that_rises_beyond_chance_is_tried_again_though_both_rates_fail() -> None:
    """Something disturbed the lower rate: it says nothing of the rates below until it was tried again."""
    search = Search(start=3.34)
    probes = [Probe(3.34, 32, {"slo": 25}), Probe(1.3, 32, {"slo": 11})]
    assert search.bracket(probes, "slo") == Bracket(0.0, math.inf)
    assert search.next_rate(probes, ["slo"]) == 1.3
    probes += 2 * [Probe(1.3, 32, {"slo": 11}), Probe(3.34, 32, {"slo": 10})]
    assert search.bracket(probes, "slo") == Bracket(0.0, 1.3)


def test_runs_that_go_on_contradicting_each_other_are_not_believed_and_the_search_ends() -> None:
    search = Search(start=1.0)
    probes = [Probe(1.0, 60, {"slo": 60}), Probe(0.5, 60, {"slo": 10})]
    while (rate := search.next_rate(probes, ["slo"])) is not None:
        probes.append(Probe(rate, 60, {"slo": 60 if 0.9 < rate < 2 else 10}))
        assert len(probes) < 60, "it ends"
    (odd,) = search.at_odds(probes, "slo")
    assert odd.rates[-1] >= 1.0
    assert odd.rates[0] < 0.9
    assert search.found(probes, "slo") is Found.CONTRADICTORY
    assert search.bracket(probes, "slo").low == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_pooled_shares_never_rise_and_no_request_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    probes = [Probe(rng.choice([1.0, 2.0, 3.0, 4.0, 5.0]), 32, {"slo": rng.randint(0, 32)}) for _ in range(9)]
    pooled = Search(start=1.0).pooled(probes, "slo")
    shares = [each.num_good / each.num_requests for each in pooled]
    assert shares == sorted(shares, reverse=True)
    assert sum(each.num_requests for each in pooled) == 9 * 32
    rates = [rate for each in pooled for rate in each.rates]
    assert rates == sorted({probe.rate for probe in probes})


def test_at_no_rate_is_said_only_when_the_lowest_has_failed() -> None:
    search = Search(start=1.0)
    probes = _run(search, {"slo": lambda _rate: 0.0})
    assert search.found(probes[:-1], "slo") is Found.NOT_KNOWN
    assert search.is_open(probes[:-1], "slo")
    assert search.found(probes, "slo") is Found.AT_NO_RATE
    assert not search.is_open(probes, "slo")
    unsure = [*probes[:-1], *(Probe(probes[-1].rate, 30, {"slo": 27}) for _ in range(3))]
    assert search.found(unsure, "slo") is Found.NOT_KNOWN


def _run(search: Search, shares: dict[str, object]) -> list[Probe]:
    """All that is tried on a server that meets each objective for a known share at each rate, without chance."""
    probes: list[Probe] = []
    while (rate := search.next_rate(probes, list(shares))) is not None:
        good = {name: round(60 * share(rate)) for name, share in shares.items()}  # type: ignore[operator]
        probes.append(Probe(rate, 60, good))
        assert len(probes) < 60, "it ends"
    return probes
