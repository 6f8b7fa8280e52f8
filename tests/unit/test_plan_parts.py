"""What a plan is made of: traffic, bounds, sentences, the page; and the real simulator on a small case."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from support.planned import KV, SLO, Affine, Pretended, bottleneck, kv, question, requests, space

from twinpool.bench.reports.model import Interval
from twinpool.bench.reports.page import page
from twinpool.bench.serving.datasets.shapes import Shape, own, shared_prefix
from twinpool.bench.serving.slo import Slo, parse_slo
from twinpool.config import Role, SchedulerConfig
from twinpool.errors import ConfigError
from twinpool.layout import Dtype
from twinpool.planner.plan.bounds import Limit, bound, bounds
from twinpool.planner.plan.capacity import DeviceMemory, kv_capacity
from twinpool.planner.plan.experiments import Setting
from twinpool.planner.plan.layouts import Layout, LayoutSpace, WorkerKind
from twinpool.planner.plan.perturbing import Change, Effect
from twinpool.planner.plan.planning import Planning
from twinpool.planner.plan.report import plan_report
from twinpool.planner.plan.simulated import simulated
from twinpool.planner.plan.study import Question
from twinpool.planner.plan.tables import printed
from twinpool.planner.plan.telling import plan_of
from twinpool.planner.plan.traffic import lengths_of, new_tokens, traffic_of
from twinpool.planner.plan.words import Reason, compared, constraint, effect_words
from twinpool.planner.step_shape import StepShape, of_request
from twinpool.planner.times.devices import DEVICES
from twinpool.planner.times.model_shapes import SHAPES, model_shape
from twinpool.planner.times.registry import Conditions, roofline
from twinpool.planner.times.roofline import Roofline


def timed(*times: float) -> list[Shape]:
    return [Shape((own(number, 100),), 10, at_s) for number, at_s in enumerate(times)]


def test_a_stretch_has_the_rate_that_is_asked_for_and_the_traces_own_bursts() -> None:
    trace = traffic_of(timed(0.0, 1.0, 1.5, 1.6, 5.0))
    assert trace.rate_per_s == pytest.approx(4 / 5)
    slow, fast = (trace.stretch(rate, 4, replication=0) for rate in (0.5, 5.0))
    assert [shape.pieces for shape in slow] == [shape.pieces for shape in fast]
    assert [shape.at_s for shape in slow] == pytest.approx([10 * (shape.at_s or 0) for shape in fast])
    gaps = [(b.at_s or 0) - (a.at_s or 0) for a, b in pairwise(slow)]
    assert max(gaps) > 5 * min(gaps)


def test_a_stretch_beyond_the_traces_end_goes_on_with_prompts_that_share_nothing_with_earlier_ones() -> None:
    shapes = [Shape((shared_prefix(0, 64), own(number, 36)), 10, float(number)) for number in range(4)]
    found = traffic_of(shapes).stretch(1.0, 10, replication=0)
    assert len({shape.pieces[1].key for shape in found}) == 10
    assert len({shape.pieces[0].key for shape in found}) == 3, "one on each round through the trace"


def test_other_replications_begin_elsewhere_and_other_seeds_too() -> None:
    trace = traffic_of(timed(*range(1000)))
    starts = {(seed, r): trace.stretch(1.0, 10, r, seed)[0].pieces for seed in (0, 1) for r in range(4)}
    assert len(set(starts.values())) == 8


def test_traffic_without_times_comes_as_a_poisson_process_of_the_seed() -> None:
    data = traffic_of(requests(100), rate_per_s=3.0)
    one, same, other = (data.stretch(3.0, 100, replication, 7) for replication in (0, 0, 1))
    assert one == same
    assert [shape.at_s for shape in one] != [shape.at_s for shape in other]
    gaps = [(b.at_s or 0) - (a.at_s or 0) for a, b in pairwise(one)]
    mean = sum(gaps) / len(gaps)
    assert 0.6 < sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2 < 1.6


def test_prompts_that_begin_like_earlier_ones_are_new_only_behind_that() -> None:
    shapes = [Shape((shared_prefix(number % 2, 64), own(number, 36)), 10) for number in range(4)]
    assert new_tokens(shapes).tolist() == [100, 100, 36, 36]
    assert lengths_of(shapes).reused_share == pytest.approx(128 / 400)


def test_longer_prompts_share_as_large_a_part_and_answers_stay() -> None:
    shapes = [Shape((shared_prefix(0, 50), own(number, 50)), 10, float(number)) for number in range(4)]
    data = traffic_of(shapes)
    assert [piece.num_tokens for piece in data.longer(1.2).shapes[0].pieces] == [60, 60]
    assert data.longer(1.2).shapes[0].output_tokens == 10
    assert data.longer(1.2).name != data.name, "they are other experiments"


def test_the_mean_context_counts_long_answers_as_often_as_they_are_there() -> None:
    """99 steps at 100 + 50 tokens, 9 at 100 + 5."""
    shapes = [Shape((own(0, 100),), 100), Shape((own(1, 100),), 10)]
    assert lengths_of(shapes).context == pytest.approx((99 * 150 + 9 * 105) / 108)


@pytest.mark.parametrize(
    ("changed", "slo", "limit"),
    [
        ({"num_blocks": 700}, SLO, Limit.KV),
        ({"num_blocks": 100_000}, SLO, Limit.SLOTS),
        ({"num_blocks": 100_000}, Slo(itl_p99_s=0.008), Limit.ITL),
    ],
)
def test_decode_is_bound_by_memory_slots_or_the_objective(
    changed: dict[str, int], slo: Slo, limit: Limit
) -> None:
    lengths = lengths_of(requests())
    found = {each.role: each for each in bounds(space(**changed), Layout(1, 1), lengths, slo)}[Role.DECODE]
    assert found.limit is limit
    step_s = 0.005 + 1e-4 * found.num_sequences
    assert found.rate_per_s == pytest.approx(found.num_sequences / step_s / 100)


def test_prefills_bound_is_that_of_full_steps_and_twice_as_much_with_two_workers() -> None:
    lengths = lengths_of(requests())
    one, two = (bound(space(num_blocks=100_000), Layout(x, 9), lengths, SLO) for x in (1, 2))
    assert one.limit is Limit.PREFILL
    assert one.rate_per_s == pytest.approx(2048 / (0.005 + 0.2048) / 1000)
    assert two.rate_per_s == pytest.approx(2 * one.rate_per_s)


def test_what_prompts_share_takes_memory_once_so_the_bound_is_above_what_the_real_simulator_serves() -> None:
    shapes = [Shape((shared_prefix(number % 2, 896), own(number, 104)), 101) for number in range(300)]
    data, slo = traffic_of(shapes), Slo(ttft_s=1.0, itl_p99_s=0.1)
    sharing = space(num_blocks=1200)
    apart = replace(sharing, decode=replace(sharing.decode, prefix_cache=False))
    least, most = (bound(each, Layout(1, 1), lengths_of(shapes), slo) for each in (apart, sharing))
    assert least.limit is Limit.KV
    assert most.rate_per_s > 2 * least.rate_per_s
    seen = simulated(sharing.deployment(Layout(1, 1)), data.stretch(1.8 * least.rate_per_s, 300, 0))
    assert seen.share_good(slo) > 0.9, "beyond what they would serve if each had its own"


def test_the_floor_of_all_requests_is_the_mean_of_theirs_also_where_long_prompts_have_short_answers() -> None:
    floor = Roofline(DEVICES["h100"], SHAPES["llama-3.1-8b"])
    lengths = [(30_000, 2), (20, 4_000)]
    shapes = [Shape((own(number, new),), output) for number, (new, output) in enumerate(lengths)]
    together_s = floor.least_accelerator_s(lengths_of(shapes).request)
    each_s = [floor.least_accelerator_s(of_request(new, output)) for new, output in lengths]
    assert together_s <= sum(each_s) / 2 * (1 + 1e-6)
    assert together_s > sum(each_s) / 4


def test_blocks_that_decode_has_cached_do_not_burden_the_link() -> None:
    shapes = [Shape((shared_prefix(0, 896), own(number, 104)), 101) for number in range(300)]
    slow = space(Affine(link_bytes_per_s=KV.token_bytes * 1000))
    apart = replace(slow, decode=replace(slow.decode, prefix_cache=False))
    least, most = (bound(each, Layout(1, 1), lengths_of(shapes), SLO).rate_per_s for each in (apart, slow))
    assert least == pytest.approx(1.0)
    assert most == pytest.approx(1000 / (104 + 896 / 300), rel=1e-3)


def test_a_slow_link_bounds_a_split() -> None:
    lengths = lengths_of(requests())
    slow = Affine(link_bytes_per_s=KV.token_bytes * 1000)
    assert bound(space(slow), Layout(1, 1), lengths, SLO).limit is Limit.LINK
    assert bound(space(slow), Layout(1, 1), lengths, SLO).rate_per_s == pytest.approx(1.0)


class OnTwoCores(Affine):
    """Workers of one core each: more than two take turns."""

    def step_s(self, shape: StepShape, num_busy: int = 0) -> float:
        return super().step_s(shape) * max(1.0, (1 + num_busy) / 2)


@pytest.mark.parametrize(
    "made", [lambda count: Layout(0, 0, count, 1, 1, 1024), lambda count: Layout(count, 99)]
)
def test_workers_beyond_the_cores_that_they_share_raise_no_bound(made: Callable[[int], Layout]) -> None:
    apart = space(OnTwoCores(), num_blocks=100_000)
    lengths = lengths_of(requests())
    for machine, most in ((None, 3), ("here", 2)):
        rates = [
            bound(replace(apart, machine=machine), made(count), lengths, SLO).rate_per_s
            for count in (1, 2, 3)
        ]
        assert rates == pytest.approx([rates[0], 2 * rates[0], most * rates[0]])


def test_a_colocated_worker_is_bound_by_the_budget_or_the_objective() -> None:
    lengths = lengths_of(requests())
    budgets = {
        b: bound(space(num_blocks=100_000), Layout(0, 0, 1, 1, 1, b), lengths, SLO) for b in (256, 1024)
    }
    assert budgets[256].limit is Limit.BUDGET
    assert budgets[1024].limit is Limit.ITL
    # B sequences and 10·B prompt tokens: 5 ms + 1.1 ms · B within 50 ms.
    tight = bound(space(), Layout(0, 0, 1, 1, 1, 1024), lengths, Slo(tpot_s=0.05))
    assert tight.num_sequences == 40
    assert tight.step_s == pytest.approx(0.049)


def test_a_hybrid_pair_is_bounded_by_the_better_of_mixed_steps_and_of_divided_time() -> None:
    """Prefill alone does 9.8 requests/s and decode 72: two workers whose time is divided 17.2, mixed steps 16.3."""
    lengths = lengths_of(requests())
    split = space(num_blocks=100_000)
    split = replace(split, decode=replace(split.decode, token_budget=2048))
    hybrid = replace(split, decode=replace(split.decode, hybrid=True))
    divided = bound(hybrid, Layout(1, 1), lengths, SLO)
    prefill, decode = (each.rate_per_s for each in bounds(split, Layout(1, 1), lengths, SLO)[:2])
    mixed = bound(split, Layout(0, 0, 2, 1, 1, 2048), lengths, SLO)
    assert divided.rate_per_s >= max(2 / (1 / prefill + 1 / decode), mixed.rate_per_s) * (1 - 1e-9)
    assert divided.rate_per_s > bound(split, Layout(1, 1), lengths, SLO).rate_per_s


def test_more_kv_is_not_tried_where_little_of_it_is_ever_in_use() -> None:
    words = effect_words(Effect(Change.KV, None, note="not tried: 13 % were in use at most"))
    assert words == "a quarter more KV memory: not tried: 13 % were in use at most"


def effect(change: Change, low: float, high: float, layout: str = "") -> Effect:
    return Effect(change, Interval((low + high) / 2, low, high), layout)


def test_what_binds_is_what_helps_most_and_the_closed_form_speaks_only_where_nothing_was_tried() -> None:
    lengths = lengths_of(requests())
    known = bounds(space(), Layout(1, 1), lengths, SLO)
    more = [effect(Change.PREFILL, -0.03, -0.01, "2P1D"), effect(Change.DECODE, 0.2, 0.3, "1P2D")]
    kv_bound = constraint(True, [*more, effect(Change.KV, 0.1, 0.2), effect(Change.ITL, 0.0, 0.1)], known)
    assert kv_bound is not None
    assert kv_bound.words.startswith(
        "Decode is KV-bound: one more decode worker (1P2D) raises capacity by 25 % [20, 30]"
    )
    assert "one more prefill worker (2P1D) lowers capacity by 2.0 % [1.0, 3.0]" in kv_bound.words
    # By its closed form it is KV-bound; but more KV was tried and helped nothing.
    other = constraint(True, [*more, effect(Change.KV, -0.01, 0.02), effect(Change.ITL, -0.01, 0.02)], known)
    assert other is not None
    assert other.reason is Reason.STEPS
    nobody = constraint(True, [effect(Change.PREFILL, -0.1, 0.1), effect(Change.DECODE, -0.1, 0.1)], known)
    assert nobody is not None
    slow = bounds(space(Affine(link_bytes_per_s=KV.token_bytes * 1000)), Layout(1, 1), lengths, SLO)
    linked = constraint(True, [effect(Change.PREFILL, 0.2, 0.3, "2P1D")], slow)
    assert linked is not None
    assert linked.reason is Reason.LINK
    assert nobody.words.startswith("No pool alone binds")
    assert constraint(True, [], known) is None


def test_splitting_pays_loses_or_makes_no_difference_in_words() -> None:
    assert compared("3P5D", "8 colocated", Interval(0.2, 0.1, 0.3)) == (
        "Splitting pays: 3P5D serves 20 % [10, 30] more than 8 colocated."
    )
    assert compared("3P5D", "8 colocated", Interval(-0.2, -0.3, -0.1)) == (
        "Splitting loses: 3P5D serves 20 % [10, 30] less than 8 colocated."
    )
    assert "No difference shown" in compared("3P5D", "8 colocated", Interval(0.2, -0.1, 0.5))


@pytest.mark.parametrize(
    ("pairs", "slo"),
    [
        (["ttft=2s", "itl=50ms"], Slo(ttft_s=2.0, itl_p99_s=0.05)),
        (["ttft=300", "tpot=0.05s", "e2el=10s"], Slo(ttft_s=0.3, tpot_s=0.05, e2e_s=10.0)),
        ([], None),
    ],
)
def test_objectives_have_units(pairs: list[str], slo: Slo | None) -> None:
    assert parse_slo(pairs) == slo


@pytest.mark.parametrize("pair", ["ttft", "ttft=", "ttft=2m", "latency=2s", "itl=-5ms", "ttft=0"])
def test_an_objective_that_is_none_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--slo is {pair!r}; allowed: ttft=TIME")):
        parse_slo([pair])
    with pytest.raises(ConfigError, match="--slo has ttft twice"):
        parse_slo(["ttft=1s", "ttft=2s"])


def test_the_page_has_the_map_with_its_best_cell_and_loads_nothing() -> None:
    planning = Planning(
        question(8.0, effort=20_000), space(), Pretended(bottleneck(5.0, 3.0, 1.0)), "a <model>"
    )
    planning.run()
    plan = plan_of(planning)
    shown = page(plan_report(plan, "2026-01-01T00:00:00+00:00", "twinpool plan"))
    assert "Prefill and decode workers" in shown
    assert shown.count("★ ") >= 2, "in the map and in the table"
    assert "a &lt;model&gt;" in shown
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", shown)
    told = printed(plan)
    assert "★ 2P3D" in told
    assert all(len(line) <= 110 for line in told.splitlines())
    narrow = printed(plan, 80)
    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert narrow.split() != told.split(), "the first column comes again"
    assert set(narrow.split()) == set(told.split())


def test_the_real_simulator_serves_with_two_prefill_workers_what_one_cannot() -> None:
    """Prompts of 256 tokens: a prefill worker does some 38 requests/s by its closed form, a decode worker many more."""
    data = traffic_of(requests(150, input_tokens=256, output_tokens=9))
    slo = Slo(ttft_s=0.3, itl_p99_s=0.03)
    lab = Planning(Question(data, slo, budget=3), space(), simulated, "a model").study.lab
    prefill = bound(space(), Layout(1, 1), lengths_of(data.shapes), slo)
    assert prefill.limit is Limit.PREFILL
    shares = {
        layout.name: lab.seen(
            Setting(layout.name, space().deployment(layout), data, 150), 1.5 * prefill.rate_per_s, 0
        ).share_good(slo)
        for layout in (Layout(1, 1), Layout(2, 1))
    }
    assert shares["1P1D"] < 0.7
    assert shares["2P1D"] > 0.9


def test_more_kv_is_whole_blocks() -> None:
    assert kv(10).num_tokens == 160
    assert space(num_blocks=100).with_more_kv(1.25).kinds[1].capacity.num_blocks == 125


def test_a_70b_on_pairs_of_80_gb_devices_is_kv_bound_and_a_prefill_worker_in_place_of_decode_lowers_capacity() -> (
    None
):
    """The real simulator: prompts of 1,000 and answers of 300 tokens; beside the weights each of the two devices of a
    worker has 6.3 GiB for KV, 41,232 tokens in all, where 35 such sequences fit. Another prefill worker beside them
    lowers nothing: decode grants blocks before KV moves, so what is prefilled early only waits."""
    model = model_shape("llama-3.1-70b")
    times = roofline("h100", model, Conditions(tp=2))
    memory = kv_capacity(
        model.kv_layout(16, Dtype.BFLOAT16),
        math.ceil(model.weight_bytes(2.0)),
        2,
        DeviceMemory(80 << 30),
        2048,
    )
    pairs = LayoutSpace(
        kinds={2: WorkerKind(times, memory)},
        kv=memory.layout,
        max_model_len=2048,
        prefill=SchedulerConfig(token_budget=2048),
        decode=SchedulerConfig(max_num_seqs=256),
        token_budgets=(1024,),
    )
    data = traffic_of(requests(2000, input_tokens=1000, output_tokens=300))
    slo = Slo(ttft_s=2.0, itl_p99_s=0.08)
    lab = Planning(Question(data, slo, budget=6), pairs, simulated, "llama-3.1-70b").study.lab
    limits = {each.role: each for each in bounds(pairs, Layout(1, 2, 0, 2, 2), lengths_of(data.shapes), slo)}
    assert limits[Role.DECODE].limit is Limit.KV
    rate = limits[Role.DECODE].rate_per_s

    def holds(prefill: int, decode: int, factor: float, of: LayoutSpace = pairs) -> bool:
        deployment = of.deployment(Layout(prefill, decode, 0, 2, 2))
        setting = Setting(f"{deployment.name} {of is pairs}", deployment, data, 300)
        return lab.seen(setting, factor * rate, 0).share_good(slo) >= 0.9

    assert holds(1, 2, 0.9)
    assert not holds(2, 1, 0.9), "in place of a decode worker it lowers capacity"
    assert not holds(1, 2, 1.25)
    assert not holds(2, 2, 1.25), "another prefill worker is not enough"
    assert holds(1, 3, 1.25), "another decode worker is"
    assert holds(1, 2, 1.25, pairs.with_more_kv(1.25)), "and so is KV memory"
