"""A plan as a page: the sentences, the heat map over (x, y), curves and tables."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.bench.reports.model import (
    ArmReport,
    Better,
    Fact,
    Figure,
    Grid,
    GridCell,
    Interval,
    Measure,
    RateCurve,
    RatePoint,
    Report,
    Unit,
)
from twinpool.bench.reports.words import number, percent
from twinpool.planner.plan.result import Plan, Planned
from twinpool.planner.plan.tables import all_tables

_RATE = Measure(name="highest rate", unit=Unit.REQUESTS_PER_S, better=Better.HIGHER)
_GOODPUT = Measure(name="goodput per accelerator", unit=Unit.REQUESTS_PER_S, better=Better.HIGHER)


def plan_report(plan: Plan, created_at: str, command: str) -> Report:
    """Arms are the layouts that replications decided between."""
    confirmed = [layout for layout in plan.layouts if layout.num_replications]
    traffic = plan.traffic
    return Report(
        title=f"plan: {plan.model}, {traffic.name}",
        created_at=created_at,
        arms=tuple(_arm(layout) for layout in confirmed),
        curves=tuple(_curve(plan, layout) for layout in confirmed if layout.tried),
        grids=tuple(grid for grid in (layout_grid(plan),) if grid.cells),
        tables=tuple(all_tables(plan, most_layouts=None)),
        num_other_runs=plan.num_simulations,
        num_other_requests=plan.num_simulated_requests,
        findings=plan.findings,
        warnings=plan.warnings,
        slo=f"{plan.slo}, by {plan.attainment:.0%} of the requests",
        hardware=tuple(Fact("service times", name) for name in plan.times),
        settings=(
            Fact("traffic", f"{traffic.num_requests:,} requests, the longest of {traffic.longest:,} tokens"),
            Fact("mean lengths", f"{traffic.input_tokens:,.0f} in, {traffic.output_tokens:,.0f} out"),
            Fact(
                "reusable", f"{percent(traffic.reused_share)} of the prompt tokens, by a cache without bounds"
            ),
            Fact("budget", f"{plan.budget} accelerators"),
            Fact("requests of a simulation", f"{plan.requests_per_simulation:,}"),
            Fact("seed", str(plan.seed)),
        ),
        commands=(command,),
        confidence=plan.confidence,
    )


def layout_grid(plan: Plan) -> Grid:
    """Goodput per accelerator over numbers of prefill and decode workers, of the best split's TP degrees."""
    splits = [layout for layout in plan.layouts if not layout.colocated]
    best = max(splits, key=lambda layout: layout.known_rate_per_s, default=None)
    shown = [] if best is None else [layout for layout in splits if _degrees(layout) == _degrees(best)]
    most = max((layout.known_rate_per_s / layout.num_accelerators for layout in shown), default=0.0)
    degrees = (
        "" if best is None or max(_degrees(best)) == 1 else f" (TP{best.prefill_tp}, TP{best.decode_tp})"
    )
    return Grid(
        title="Prefill and decode workers",
        x_name="prefill",
        y_name="decode",
        cells=tuple(_cell(plan, layout, most) for layout in shown),
        note=f"Workers{degrees}: goodput for each accelerator in requests/s and, small, the highest rate of them all. "
        "Deeper colour: more for each accelerator. Dashed: bounded only (≤). ★: recommended.",
    )


def _degrees(layout: Planned) -> tuple[int, int]:
    return layout.prefill_tp, layout.decode_tp


def _cell(plan: Plan, layout: Planned, most: float) -> GridCell:
    count = layout.num_accelerators
    if layout.rate_per_s is None:
        bound = min(layout.bound_per_s, layout.below_per_s or layout.bound_per_s)
        large, small = f"≤ {number(plan.attainment * bound / count)}", f"≤ {number(bound)}"
        return GridCell(x=layout.prefill, y=layout.decode, large=large, small=small)
    share = layout.known_rate_per_s / count / most if most else 0.0
    return GridCell(
        x=layout.prefill,
        y=layout.decode,
        large=number(plan.attainment * layout.known_rate_per_s / count),
        small=number(layout.known_rate_per_s),
        depth=share**3,  # most layouts are near the best: differences there are what is to be seen
        is_best=layout.name == plan.recommended,
    )


def _arm(layout: Planned) -> ArmReport:
    figures = [Figure(_RATE, layout.rate_per_s or Interval(0.0))]
    if layout.goodput_per_accelerator is not None:
        figures.append(Figure(_GOODPUT, layout.goodput_per_accelerator))
    bound = f"at most {number(layout.bound_per_s)} requests/s by its closed form ({layout.bound_by})"
    return ArmReport(
        name=layout.name,
        description=f"{layout.num_accelerators} accelerators; {bound}",
        figures=tuple(figures),
    )


def _curve(plan: Plan, layout: Planned) -> RateCurve:
    points: Sequence[RatePoint] = [
        RatePoint(
            rate=tried.rate_per_s,
            goodput=Interval(tried.rate_per_s * tried.attainment),
            attainment=tried.attainment,
            holds=tried.attainment >= plan.attainment,
        )
        for tried in layout.tried
    ]
    return RateCurve(arm=layout.name, points=tuple(points), highest_rate=layout.rate_per_s)
