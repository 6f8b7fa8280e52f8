"""The search over layouts, with stand-ins for the simulator whose capacities are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planned import SLO, Affine, Pretended, bottleneck, pool_sizes, question, requests, space, traffic

from twinpool.bench.serving.slo import Slo
from twinpool.config import SchedulerConfig
from twinpool.errors import ConfigError
from twinpool.planner.deployment import Deployment
from twinpool.planner.plan.bounds import Limit
from twinpool.planner.plan.layouts import Layout
from twinpool.planner.plan.planning import Planning
from twinpool.planner.plan.report import layout_grid
from twinpool.planner.plan.result import Plan, decode_plan, encode_plan
from twinpool.planner.plan.study import Question
from twinpool.planner.plan.telling import plan_of
from twinpool.planner.plan.traffic import traffic_of


def planned(
    simulate: Pretended, rate: float | None = None, machine: str | None = None, **changes: object
) -> Plan:
    asked = question(rate, **{"effort": 20_000, **changes})
    planning = Planning(asked, replace(space(), machine=machine), simulate, "a model", price_per_hour=4.0)
    planning.run()
    return plan_of(planning)


def test_the_ratio_that_balances_both_pools_is_recommended() -> None:
    """3 : 5 by 5 and 3 requests/s of each worker: 15 of all, where 2P6D and 4P4D have 10 and 12."""
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)))
    assert plan.recommended == "3P5D"
    best = plan.planned("3P5D")
    assert best is not None
    assert best.rate_per_s is not None
    assert best.num_replications == 4
    assert best.rate_per_s.estimate == pytest.approx(15.0, rel=0.02)
    assert best.goodput_per_accelerator is not None
    assert best.goodput_per_accelerator.estimate == pytest.approx(0.9 * 15 / 8, rel=0.02)


def test_it_says_when_splitting_loses() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 2.5)))
    assert plan.recommended is not None
    assert plan.recommended.startswith("8 colocated")
    assert plan.split_over_colocated is not None
    assert plan.split_over_colocated.estimate == pytest.approx(15 / 20 - 1, abs=0.02)
    assert any(text.startswith("Splitting loses: 3P5D serves 25 %") for text in plan.findings)


def test_it_says_when_splitting_pays() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.5)))
    assert any(text.startswith("Splitting pays: 3P5D serves") for text in plan.findings)


def test_layouts_within_the_noise_of_each_other_are_not_called_different() -> None:
    """The colocated ones have other luck with each stretch of the trace than the split ones."""
    plans = [
        planned(Pretended(bottleneck(5.0, 3.0, 15 / 8), spread=0.2, apart=True), seed=seed)
        for seed in range(6)
    ]
    alike = [plan for plan in plans if any("No difference shown between" in text for text in plan.findings)]
    assert len(alike) >= 4
    for plan in alike:
        assert plan.split_over_colocated is not None
        assert not plan.split_over_colocated.excludes(0.0)


def test_other_stretches_of_the_trace_widen_the_interval() -> None:
    sure, unsure = (
        planned(Pretended(bottleneck(5.0, 3.0, 1.0), spread), rate=None).planned("3P5D")
        for spread in (0.0, 0.2)
    )
    assert sure is not None
    assert unsure is not None
    assert sure.rate_per_s is not None
    assert unsure.rate_per_s is not None
    assert sure.rate_per_s.low is not None
    assert sure.rate_per_s.high is not None
    assert unsure.rate_per_s.low is not None
    assert unsure.rate_per_s.high is not None
    assert unsure.rate_per_s.high - unsure.rate_per_s.low > 5 * (sure.rate_per_s.high - sure.rate_per_s.low)


def test_kv_bound_decode_is_said_to_be_so_and_one_more_prefill_worker_to_lower_capacity() -> None:
    """Where decode's memory is short, prompts that come faster only crowd it: each prefill worker takes 4 % off."""

    def crowded(deployment: Deployment) -> float:
        x, y, k = pool_sizes(deployment)
        blocks: float = deployment.pools[-1].num_blocks / 4000
        return k * blocks if k else min(x * 5.0, y * 3.0 * blocks * (1 - 0.04 * x))

    plan = planned(Pretended(crowded))
    assert plan.recommended == "3P5D"
    assert (plan.binding_pool, plan.binding_reason) == ("decode", "KV-bound")
    sentence = next(text for text in plan.findings if text.startswith("Decode is KV-bound"))
    assert "one more prefill worker (4P5D) lowers capacity by" in sentence
    assert "one more decode worker (3P6D) raises capacity by" in sentence
    assert "a quarter more ITL allowed changes nothing that shows" in sentence


def test_traffic_whose_stretches_differ_is_said_to_be_too_much_for_some_where_the_average_is_served() -> None:
    plans = [
        planned(Pretended(bottleneck(5.0, 3.0, 1.0), spread=0.5), rate=8.0, seed=seed) for seed in range(8)
    ]
    told = [any("Stretches of this traffic differ" in text for text in plan.findings) for plan in plans]
    assert told == [bool(plan.serves) and not plan.cases[0].holds for plan in plans]
    assert any(told)
    assert not all(told)


def test_accelerators_that_no_worker_takes_are_left_over() -> None:
    asked = replace(question(), effort=20_000, budget=7)
    planning = Planning(asked, space(degrees=(4,)), Pretended(bottleneck(5.0, 3.0, 2.0)), "a model")
    planning.run()
    plan = plan_of(planning)
    assert plan.recommended is not None
    assert plan.planned(plan.recommended).num_accelerators == 4  # type: ignore[union-attr]


def test_hybrids_whose_steps_keep_the_objective_only_apart_are_simulated_as_long_as_streams_last() -> None:
    """A step of one sequence takes 5.1 ms, with one prompt token beside it 5.2."""
    both = replace(space(), decode=SchedulerConfig(max_num_seqs=128, token_budget=2048, hybrid=True))
    asked = Question(traffic(), Slo(ttft_s=10.0, tpot_s=0.00515), budget=2, effort=20_000)
    study = Planning(asked, both, Pretended(bottleneck(5.0, 3.0, 2.0)), "a model").study
    (own,) = (bound for bound in study.all_bounds(Layout(1, 1)))
    assert own.num_sequences > 0
    assert own.limit is Limit.TIME
    assert study.num_wanted(2) > 0


def test_a_prefill_pool_that_binds_is_named() -> None:
    plan = planned(Pretended(bottleneck(1.0, 100.0, 0.1)))
    assert plan.recommended == "7P1D"
    assert plan.binding_pool == "prefill"
    assert any("one more prefill worker (8P1D) raises capacity" in text for text in plan.findings)


def test_the_fewest_accelerators_that_serve_the_traffic_are_recommended_with_their_headroom() -> None:
    """Five serve min(2 · 5, 3 · 3) = 9 requests/s, four 6 at most."""
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)), rate=8.0)
    assert plan.recommended == "2P3D"
    assert plan.serves
    assert plan.headroom is not None
    assert plan.headroom.estimate == pytest.approx(1 / 8, abs=0.03)
    assert plan.findings[0].startswith("2P3D serves ")
    assert "the traffic is 8.00" in plan.findings[0]


def test_traffic_beyond_the_budget_is_said_to_be_so_with_the_number_that_would_do() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)), rate=30.0)
    assert plan.serves is False
    assert "too much for 8 accelerators; some 17 would (--budget 17)" in plan.findings[0]


def test_where_workers_share_a_machine_more_of_them_are_no_remedy_and_more_machines_are() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)), rate=40.0, machine="here")
    assert "too much for 8 accelerators; some 3 such machines would" in plan.findings[0]


def test_what_may_come_is_told_of_more_traffic_longer_prompts_and_lost_workers() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)), rate=8.0)
    cases = {case.name: case for case in plan.cases}
    assert cases["the traffic"].holds
    assert cases["20 % less traffic"].holds
    assert not cases["20 % more traffic"].holds
    assert not cases["one decode worker lost"].holds
    assert any(text.startswith("With one prefill worker lost:") for text in plan.findings)


def test_a_lost_worker_that_was_the_only_one_of_its_role_is_said_to_stop_everything() -> None:
    plan = planned(Pretended(bottleneck(50.0, 3.0, 1.0)), rate=None, budget=4)
    assert plan.recommended == "1P3D"
    case = next(case for case in plan.cases if case.name == "one prefill worker lost")
    assert case.attainment is None
    assert "no prefill worker is left" in case.note


def test_costs_are_those_of_the_accelerators_at_the_rate_and_split_pools_bear_their_own_tokens() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)))
    (cost,) = plan.costs
    assert cost.per_request == pytest.approx(8 * 4.0 / 3600 / cost.rate_per_s)
    assert cost.per_million_input * 1000 / 1e6 == pytest.approx(cost.per_request * 3 / 8)
    assert cost.per_million_output * 101 / 1e6 == pytest.approx(cost.per_request * 5 / 8)


def test_interrupted_it_tells_what_is_known() -> None:
    for stops_after in (0, 3, 20, 60):
        plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0), stops_after=stops_after))
        assert plan.was_interrupted
        assert (plan.recommended is None) == (stops_after <= 3)
        assert any("Interrupted" in text for text in plan.findings)
        assert decode_plan(encode_plan(plan)) == plan


def test_interrupted_among_replications_it_recommends_the_best_that_is_known() -> None:
    """However few of the best one's replications were simulated, and of another one's more."""
    num_checked = 0
    for stops_after in range(8, 40):
        simulate = Pretended(bottleneck(5.0, 3.0, 2.5), stops_after=stops_after)
        plan = planned(simulate, rate=4.0)
        known = {
            layout.name: layout.known_rate_per_s for layout in plan.layouts if layout.num_accelerators == 2
        }
        if plan.was_interrupted and known.get("2 colocated (1,024)", 0.0) > 4.0:
            assert plan.recommended is not None
            assert known[plan.recommended] == max(known.values())
            num_checked += 1
    assert num_checked > 3


def test_the_same_seed_is_the_same_plan_to_the_last_byte() -> None:
    one, other = (encode_plan(planned(Pretended(bottleneck(5.0, 3.0, 1.0), 0.1), seed=3)) for _ in range(2))
    assert one == other


def test_layouts_whose_bound_is_below_what_was_found_are_not_simulated() -> None:
    """1P7D has prompts of 1,000 tokens at 0.1 s each: under 10 requests/s, and a better split was found first."""
    plan = planned(Pretended(bottleneck(9.0, 9.0, 9.0)), effort=10_000)
    simulated = {layout.name for layout in plan.layouts if layout.rate_per_s is not None}
    assert "4P4D" in simulated
    assert "1P7D" not in simulated
    bounded = plan.planned("1P7D")
    assert bounded is not None
    assert bounded.bound_by == "prefill: the time of its prompts"


def test_the_map_has_every_pair_within_the_budget() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)), budget=5)
    cells = layout_grid(plan).cells
    assert {(cell.x, cell.y) for cell in cells} == {(x, y) for x in range(1, 5) for y in range(1, 6 - x)}
    assert [(cell.x, cell.y) for cell in cells if cell.is_best] == [(2, 3)]


def test_mixed_tp_degrees_are_among_the_layouts() -> None:
    layouts = {layout.name for layout in space(degrees=(1, 2)).splits(4)}
    assert {"1P3D", "2P2D", "1P(TP2)2D", "2P1D(TP2)", "1P(TP2)1D(TP2)"} <= layouts


def test_a_model_that_takes_several_devices_is_planned_for_as_well() -> None:
    planning = Planning(
        question(effort=20_000), space(degrees=(2, 4)), Pretended(bottleneck(5.0, 3.0, 9.0)), "a model", 4.0
    )
    planning.run()
    plan = plan_of(planning)
    assert plan.recommended is not None
    assert plan.recommended.startswith("4 colocated TP2")
    best = plan.planned(plan.recommended)
    assert best is not None
    assert best.num_accelerators == 8


def test_an_objective_below_the_floor_is_refused_with_the_one_that_would_do() -> None:
    with pytest.raises(
        ConfigError, match=r"--slo ttft=50ms is below the floor: 90% .* take up to 105 ms.*allow 110 ms"
    ):
        Planning(question(slo=Slo(ttft_s=0.05)), space(), Pretended(bottleneck(1, 1, 1)))
    with pytest.raises(ConfigError, match="--slo itl=4ms is below the floor"):
        Planning(question(slo=Slo(itl_p99_s=0.004)), space(), Pretended(bottleneck(1, 1, 1)))


def test_a_budget_that_holds_no_worker_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--budget is 1, and one worker takes 2 accelerators .*--budget 2 or more"
    ):
        Planning(question(budget=1), space(degrees=(2, 4)), Pretended(bottleneck(1, 1, 1)))


def test_a_budget_of_one_worker_says_that_no_split_was_tried() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)), budget=1)
    assert any("No split was tried: it takes 2 accelerators at least" in text for text in plan.findings)


def test_a_trace_without_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no outputs: none is longer than 1 token"):
        traffic_of(requests(10, output_tokens=1))


def test_an_objective_that_no_step_meets_is_not_searched_for() -> None:
    """One sequence alone keeps 6 ms; with any prompt token beside it a colocated step does not."""
    times = Affine(fixed_s=0.005, prompt_token_s=0.01, sequence_s=1e-3)
    planning = Planning(
        question(slo=Slo(tpot_s=0.0061, ttft_s=100.0), budget=2),
        space(times),
        Pretended(bottleneck(5, 3, 1)),
    )
    assert [layout.name for layout in planning.study.layouts(2)] == ["1P1D"]


def test_traffic_is_what_the_slo_bounds_of_a_question_are_for() -> None:
    with pytest.raises(ConfigError, match=r"--attainment is 1\.5"):
        question(attainment=1.5)
    assert traffic(5.0).rate_per_s == 5.0
    assert SLO.ttft_s == 1.0


def test_a_rate_that_few_accelerators_serve_costs_no_search_of_the_whole_budget() -> None:
    """Two of 64 serve it: no larger layout is simulated but those with one worker more."""
    plan = planned(Pretended(bottleneck(5.0, 3.0, 1.0)), rate=2.0, budget=64)
    assert plan.recommended == "1P1D"
    assert max(layout.num_accelerators for layout in plan.layouts if layout.tried) <= 3
    assert {size.num_accelerators: size.verdict for size in plan.sizes} == {
        1: "those with the highest bounds fail in a short stretch",
        2: "one serves it",
        3: "one serves it",
    }


def test_sizes_whose_bounds_are_below_the_rate_are_not_simulated_and_said_to_be_so() -> None:
    """Prompts of 1,000 tokens at 0.1 s: 9.8 requests/s of one worker at most."""
    plan = planned(Pretended(bottleneck(9.0, 9.0, 1.0)), rate=17.5)
    verdicts = {size.num_accelerators: size.verdict for size in plan.sizes}
    assert verdicts[1] == verdicts[2] == "no layout's bound reaches the rate"
    assert plan.recommended == "2P2D"


def test_where_replications_take_back_what_a_short_stretch_said_the_next_size_is_tried() -> None:
    """The stretch of the short search is a lucky one, by a fifth; on average five accelerators serve 9, six 10."""
    lucky = Pretended(bottleneck(5.0, 3.0, 1.0), spread=0.3)
    plans = [planned(lucky, rate=9.3, seed=seed) for seed in range(4)]
    taken_back = "one holds in a short stretch, and by all replications none does"
    assert any(size.verdict == taken_back for plan in plans for size in plan.sizes)
    for plan in plans:
        best = plan.planned(plan.recommended)
        assert best is not None
        assert plan.serves is (best.known_rate_per_s >= 9.3)
        assert plan.serves or best.num_accelerators == 8


def test_layouts_that_were_not_searched_for_say_why_and_what_they_are_below() -> None:
    plan = planned(Pretended(bottleneck(9.0, 9.0, 2.0)), effort=10_000)
    bounded = plan.planned("1P7D")
    assert bounded is not None
    assert bounded.pruned == "its bound is below what another one serves"
    assert bounded.below_per_s == bounded.bound_per_s
    for layout in plan.layouts:
        assert (layout.rate_per_s is None) is bool(layout.pruned)


def test_a_layout_that_is_shown_to_be_worse_has_no_further_replications() -> None:
    plan = planned(Pretended(bottleneck(5.0, 3.0, 0.5), spread=0.05))
    split, colocated = (plan.planned(name) for name in ("3P5D", "8 colocated (1,024)"))
    assert split is not None
    assert colocated is not None
    assert (split.num_replications, colocated.num_replications) == (4, 2)
    assert any("Splitting pays: 3P5D serves" in text for text in plan.findings)


def test_layouts_that_hold_at_no_rate_are_not_recommended_and_do_not_take_all_the_time() -> None:
    simulate = Pretended(bottleneck(1e-9, 1e-9, 1e-9))
    plan = planned(simulate)
    assert plan.recommended is None
    assert plan.findings[0].startswith("No layout meets the objectives at any rate that was tried")
    assert simulate.num_runs < 60


def test_hybrids_bear_costs_by_what_prompts_and_steps_take_and_colocated_workers_are_none() -> None:
    hybrid = replace(space(), decode=replace(space().prefill, hybrid=True))
    seen: list[bool] = []

    def capacity(deployment: Deployment) -> float:
        x, y, k = pool_sizes(deployment)
        seen.append(deployment.pools[-1].scheduler.hybrid is not bool(k))
        return k * 1.0 + min(x * 5.0, y * 3.0)

    planning = Planning(question(effort=20_000), hybrid, Pretended(capacity), "a model", 4.0)
    planning.run()
    plan = plan_of(planning)
    assert all(seen)
    assert plan.recommended == "3P5D"
    (cost,) = plan.costs
    assert cost.per_million_input * 1000 / 1e6 != pytest.approx(cost.per_request * 3 / 8)
    assert any("hybrids" in text for text in plan.findings)
