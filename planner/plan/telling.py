"""What a planning has come to, as a `Plan`: rows, costs and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from twinpool.bench.reports.model import Interval
from twinpool.bench.reports.words import number, percent, signed_percent
from twinpool.config import Role
from twinpool.planner.plan.bounds import accelerator_seconds
from twinpool.planner.plan.cost import RequestWork, cost
from twinpool.planner.plan.layouts import Layout, accelerators
from twinpool.planner.plan.planning import Planning
from twinpool.planner.plan.result import (
    Case,
    CostRow,
    EffectRow,
    Memory,
    Plan,
    Planned,
    Size,
    TrafficFacts,
    Tried,
)
from twinpool.planner.plan.study import Why
from twinpool.planner.plan.words import compared, constraint
from twinpool.planner.times.devices import GIB


def plan_of(planning: Planning) -> Plan:
    """All that is known, also if the planning was interrupted."""
    question, study, layout = planning.question, planning.study, planning.recommended
    bounds = () if layout is None else study.all_bounds(layout)
    binds = None if layout is None else constraint(layout.is_split, planning.effects, bounds)
    effects = (
        EffectRow(
            change=effect.change.value,
            layout=effect.layout,
            capacity=effect.capacity,
            is_shown=bool(effect.shown),
            note=effect.note,
        )
        for effect in planning.effects
    )
    return Plan(
        model=planning.model,
        times=tuple(dict.fromkeys(kind.times.name for kind in planning.space.kinds.values())),
        slo=str(question.slo),
        attainment=question.attainment,
        budget=question.budget,
        confidence=question.confidence,
        seed=question.seed,
        traffic=_traffic(planning),
        memory=tuple(_memory(planning)),
        layouts=tuple(_planned(planning)),
        sizes=tuple(Size(count, verdict.value) for count, verdict in sorted(planning.search.sizes.items())),
        recommended=None if layout is None else layout.name,
        serves=None if layout is None else _serves(planning, layout),
        headroom=None if layout is None else _headroom(planning, layout),
        split_over_colocated=_split_over_colocated(planning),
        binding_pool="" if binds is None or binds.pool is None else binds.pool.value,
        binding_reason="" if binds is None or binds.reason is None else binds.reason.value,
        effects=tuple(effects),
        cases=tuple(planning.cases),
        price_per_hour=planning.price_per_hour,
        costs=() if layout is None else tuple(_costs(planning, layout)),
        warnings=planning.doubts,
        findings=tuple(_findings(planning, "" if binds is None else binds.words)),
        num_simulations=study.lab.num_simulations,
        num_simulated_requests=study.lab.num_requests,
        requests_per_simulation=0 if layout is None else study.num_requests(layout.num_accelerators),
        was_interrupted=planning.was_interrupted,
    )


def _traffic(planning: Planning) -> TrafficFacts:
    traffic, lengths = planning.question.traffic, planning.study.lengths
    return TrafficFacts(
        name=traffic.name,
        num_requests=len(traffic.shapes),
        rate_per_s=traffic.rate_per_s,
        input_tokens=lengths.input_tokens,
        output_tokens=lengths.output_tokens,
        reused_share=lengths.reused_share,
        longest=lengths.longest,
    )


def _memory(planning: Planning) -> Iterator[Memory]:
    lengths, longest = planning.study.lengths, planning.space.max_model_len
    typical = lengths.median_input + lengths.median_output
    for degree, kind in sorted(planning.space.kinds.items()):
        capacity = kind.capacity
        yield Memory(
            tp=degree,
            usable_gib=capacity.usable_bytes / GIB,
            weights_gib=capacity.weight_bytes / GIB,
            kv_gib=capacity.kv_bytes / GIB,
            num_blocks=capacity.num_blocks,
            num_tokens=capacity.num_tokens,
            typical_tokens=typical,
            typical_sequences=capacity.num_sequences(typical),
            longest_tokens=longest,
            longest_sequences=capacity.num_sequences(longest),
        )


def _planned(planning: Planning) -> Iterator[Planned]:
    """Those that were simulated, the best first, then the rest of the map."""
    study = planning.study
    known = sorted(study.rough, key=lambda each: (-(study.rate(each) or 0.0), each))
    known += sorted(study.pruned, key=lambda each: (-study.pruned[each].below_per_s, each))
    rest = (each for each in planning.map_layouts() if each in study.layouts(each.num_accelerators))
    yield from (_row(planning, layout) for layout in dict.fromkeys((*known, *rest)))


def _row(planning: Planning, layout: Layout) -> Planned:
    bound, pruned = planning.study.bound(layout), planning.study.pruned.get(layout)
    rate = _rate(planning, layout)
    why = None if rate is not None else Why.SIZE if pruned is None else pruned.why
    pool = "both pools" if layout.is_split and bound.role is Role.COLOCATED else bound.role.value
    share = planning.question.attainment / layout.num_accelerators
    shares = planning.study.lab.shares(planning.study.setting(layout), planning.question.slo)
    return Planned(
        name=layout.name,
        prefill=layout.prefill,
        decode=layout.decode,
        colocated=layout.colocated,
        prefill_tp=layout.prefill_tp,
        decode_tp=layout.decode_tp,
        token_budget=layout.token_budget,
        num_accelerators=layout.num_accelerators,
        bound_per_s=bound.rate_per_s,
        bound_by=f"{pool}: {bound.limit.value}",
        below_per_s=None if pruned is None else pruned.below_per_s,
        pruned="" if why is None else why.value,
        rate_per_s=rate,
        goodput_per_accelerator=None if rate is None else _scaled(rate, share),
        num_replications=len(planning.study.sure.get(layout, ())),
        tried=tuple(Tried(at, fmean(found), len(found)) for at, found in shares.items()),
    )


def _rate(planning: Planning, layout: Layout) -> Interval | None:
    """The highest rate, as well as it is known."""
    rough = planning.study.rough.get(layout)
    return planning.study.interval(layout) or (None if rough is None else Interval(rough))


def _serves(planning: Planning, layout: Layout) -> bool | None:
    wanted = planning.question.traffic.rate_per_s
    return None if wanted is None else planning.study.serves(layout, wanted)


def _headroom(planning: Planning, layout: Layout) -> Interval | None:
    wanted, rate = planning.question.traffic.rate_per_s, _rate(planning, layout)
    if wanted is None or rate is None:
        return None
    found = _scaled(rate, 1 / wanted)
    return Interval(
        found.estimate - 1,
        None if found.low is None else found.low - 1,
        None if found.high is None else found.high - 1,
    )


def _costs(planning: Planning, layout: Layout) -> Iterator[CostRow]:
    """At the traffic's rate and at the capacity. All accelerators are paid for, whatever they do: of split pools each
    bears its own tokens, colocated ones share by what prompts and decode steps take."""
    study, price = planning.study, planning.price_per_hour
    capacity = study.rate(layout) or 0.0
    if price is None or capacity <= 0:
        return
    if layout.is_split and not planning.space.decode.hybrid:
        prefill, decode = float(layout.prefill * layout.prefill_tp), float(layout.decode * layout.decode_tp)
    else:
        prefill, decode = accelerator_seconds(planning.space, layout, study.lengths, planning.question.slo)
    whole = layout.num_accelerators / capacity / (prefill + decode)
    work = RequestWork(prefill * whole, decode * whole)
    wanted = planning.question.traffic.rate_per_s
    rates = {"at capacity": capacity}
    if wanted is not None and wanted < capacity:
        rates = {"at the traffic's rate": wanted, **rates}
    for name, rate in rates.items():
        use = rate / capacity
        found = cost(price, work, study.lengths.input_tokens, study.lengths.output_tokens, use)
        yield CostRow(
            name=name,
            rate_per_s=rate,
            use=use,
            per_request=found.per_request,
            per_thousand_requests=found.per_thousand_requests,
            per_million_input=found.per_million_input,
            per_million_output=found.per_million_output,
        )


def _best_of_both(planning: Planning) -> tuple[Layout | None, Layout | None]:
    study, finalists = planning.study, planning.search.finalists
    split = study.best(layout for layout in finalists if layout.is_split)
    return split, study.best(layout for layout in finalists if not layout.is_split)


def _split_over_colocated(planning: Planning) -> Interval | None:
    split, colocated = _best_of_both(planning)
    return None if split is None or colocated is None else planning.study.difference(colocated, split)


def _findings(planning: Planning, binds: str) -> Iterator[str]:
    layout = planning.recommended
    if layout is None:
        yield (
            "Interrupted before a layout was simulated."
            if planning.was_interrupted
            else "No layout meets the objectives at any rate that was tried: loosen --slo, or take faster accelerators."
        )
        return
    yield _verdict(planning, layout)
    split, colocated = _best_of_both(planning)
    if split is not None and colocated is not None:
        yield compared(split.name, colocated.name, _split_over_colocated(planning))
    else:
        yield _without_comparison(planning, layout)
    if binds:
        yield binds
    if planning.cases and planning.cases[0].uses:
        yield _use_words(planning.cases[0])
    for case in planning.cases:
        if not case.holds:
            yield f"With {case.name}: {_case_words(case)}."
    if planning.cases and not planning.cases[0].holds and _serves(planning, layout):
        yield (
            "Stretches of this traffic differ so much that its own rate, which is served on average, is too much for "
            "some: plan for the lower end of the interval, or make stretches longer (--effort)."
        )
    yield from _notes(planning, layout)


def _verdict(planning: Planning, layout: Layout) -> str:
    question, count = planning.question, layout.num_accelerators
    rate = planning.study.rate(layout) or 0.0
    wanted = question.traffic.rate_per_s
    serves = (
        f"{layout.name} serves {number(rate)} requests/s with {question.attainment:.0%} within {question.slo}"
    )
    if wanted is None:
        return f"{serves}: the most that was found with {accelerators(count)}."
    if rate >= wanted:
        headroom = signed_percent(rate / wanted - 1)
        fewest = ", the fewest that were found to serve it" if planning.search.finalists else ""
        return f"{serves}; the traffic is {number(wanted)}: {headroom} headroom with {accelerators(count)}{fewest}."
    remedy = ""
    if rate and planning.space.machine is not None:  # more workers would share the cores that these have
        remedy = f"; some {math.ceil(wanted / rate)} such machines would"
    elif rate:
        needed = math.ceil(count * wanted / rate)
        remedy = f"; some {needed} would (--budget {needed})"
    return f"{serves}, and the traffic is {number(wanted)}: too much for {accelerators(count)}{remedy}."


def _without_comparison(planning: Planning, layout: Layout) -> str:
    """Of splitting, where no split and colocated layout of the recommended size were compared."""
    study, budget = planning.study, planning.question.budget
    splits = [each for each in (*study.rough, *study.pruned) if each.is_split]
    if not splits:
        fewest = 2 * min(planning.space.kinds)
        if not planning.space.can_split:
            return "No split was tried: the profile has no transfers, so nobody knows what moving KV takes."
        if budget < fewest:
            return f"No split was tried: it takes {fewest} accelerators at least (--budget {fewest})."
        if layout.num_accelerators < fewest:
            return f"No split was tried: it takes {fewest} accelerators at least, and fewer do."
        return "No split meets the objectives."
    best = [study.best(each for each in study.rough if each.is_split is kind) for kind in (True, False)]
    told = " and ".join(
        f"{layout.name} {number(study.rate(layout) or 0.0)}" for layout in best if layout is not None
    )
    return f"Split and colocated, by one short search each, at most serve: {told} requests/s."


def _notes(planning: Planning, layout: Layout) -> Iterator[str]:
    scheduler, budget = planning.space.decode, layout.token_budget or planning.space.prefill.token_budget
    yield (
        f"Workers were simulated with --token-budget {budget} --max-num-seqs {scheduler.max_num_seqs}: to have these "
        "rates, `twinpool serve` needs the same."
    )
    study, size = planning.study, layout.num_accelerators
    wanted, had = study.num_wanted(size), study.num_requests(size)
    if had < wanted:
        effort = math.ceil(planning.question.effort * wanted / had / 10_000) * 10_000
        yield (
            f"Each simulation had {had:,} requests, {percent(had / wanted)} of what it takes to see queues that grow "
            f"slowly, so rates may be too high; --effort {effort} has them all."
        )
    if study.is_at_bound(layout):
        lasts_s = had / study.bound(layout).rate_per_s
        yield (
            f"{layout.name} held its objectives at every rate up to its bound in closed form: stretches of {had:,} "
            f"requests ({number(lasts_s)} s) do not show where it ends, so that is an upper end."
        )
    if planning.space.decode.hybrid and planning.space.can_split:
        yield "The workers of split layouts are hybrids: those of both pools also take whole requests."
    if planning.was_interrupted:
        yield "Interrupted: this is what was known by then."


def _use_words(case: Case) -> str:
    pools = "; ".join(
        f"{role} workers compute {percent(use.busy_share)} of the time and have {percent(use.kv_share)} of their KV "
        f"memory in use, {percent(use.most_kv_share)} at most"
        for role, use in sorted(case.uses.items(), reverse=True)
    )
    return f"With {case.name}, {pools}."


def _case_words(case: Case) -> str:
    if case.attainment is None:
        return case.note
    return f"{percent(case.attainment)} of the requests within the objectives at {number(case.rate_per_s)} requests/s"


def _scaled(interval: Interval, factor: float) -> Interval:
    return Interval(
        interval.estimate * factor,
        None if interval.low is None else interval.low * factor,
        None if interval.high is None else interval.high * factor,
    )
