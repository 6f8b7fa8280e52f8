"""A plan as tables, in words: for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap

from twinpool.bench.reports.model import Interval, Table, Unit
from twinpool.bench.reports.words import NONE, amount, bracketed, ends, number, percent, signed_percent
from twinpool.planner.plan.result import Case, Plan, Planned

_MOST_LAYOUTS = 10
WIDTH = 110
"""Characters of a line, if the terminal has as many."""


def layout_table(plan: Plan, most: int | None = _MOST_LAYOUTS) -> Table:
    """The layouts that were simulated, the best first."""
    simulated = [
        layout
        for layout in plan.layouts
        if layout.rate_per_s is not None or (layout.below_per_s or math.inf) < layout.bound_per_s
    ]
    names = ("layout", "accelerators", "requests/s", "goodput each", "at most", "which is set by")
    shown = simulated[:most]
    left = len(simulated) - len(shown)
    notes = [
        f"requests/s: the highest rate with {plan.attainment:.0%} within the objectives, in brackets its "
        f"{percent(plan.confidence)} interval; ≈ and < by one short search. At most: the bound in closed form."
    ]
    if left:
        notes.append(f"{left} worse ones are left out.")
    rows = tuple(_layout_row(plan, layout) for layout in shown)
    return Table(title="Layouts", columns=names, rows=rows, note=" ".join(notes))


def _layout_row(plan: Plan, layout: Planned) -> tuple[str, ...]:
    mark = "★ " if layout.name == plan.recommended else ""
    return (
        f"{mark}{layout.name}",
        str(layout.num_accelerators),
        _rate(layout),
        "" if layout.goodput_per_accelerator is None else number(layout.goodput_per_accelerator.estimate),
        number(layout.bound_per_s),
        layout.bound_by,
    )


def _rate(layout: Planned) -> str:
    if layout.rate_per_s is None:
        return NONE if layout.below_per_s is None else f"< {number(layout.below_per_s)}"
    if layout.rate_per_s.low is None:
        return f"≈ {number(layout.rate_per_s.estimate)}" if layout.rate_per_s.estimate else "none"
    return f"{number(layout.rate_per_s.estimate)} {ends(layout.rate_per_s, Unit.REQUESTS_PER_S)}".strip()


def memory_table(plan: Plan) -> Table:
    """KV beside the weights, by TP degree."""
    names = (
        "devices",
        "usable",
        "weights",
        "KV",
        "blocks",
        "KV tokens",
        "typical sequences",
        "longest sequences",
    )
    rows = tuple(
        (
            f"TP{memory.tp}",
            f"{memory.usable_gib:.1f} GiB",
            f"{memory.weights_gib:.1f} GiB" if memory.weights_gib else NONE,
            f"{memory.kv_gib:.1f} GiB",
            f"{memory.num_blocks:,}",
            f"{memory.num_tokens:,}",
            f"{memory.typical_sequences:,} of {memory.typical_tokens:,} tokens",
            f"{memory.longest_sequences:,} of {memory.longest_tokens:,} tokens",
        )
        for memory in plan.memory
    )
    note = "GiB of each device of a worker; blocks and sequences of the worker."
    return Table(title="KV memory of one worker", columns=names, rows=rows, note=note)


def case_table(plan: Plan) -> Table:
    """How the recommended layout stands what may come."""
    names = (plan.recommended or "", "requests/s", "within objectives", "p50 TTFT", "p99 TTFT", "p99 ITL", "")
    return Table(title="Headroom and what may come", columns=names, rows=tuple(map(_case_row, plan.cases)))


def _case_row(case: Case) -> tuple[str, ...]:
    if case.attainment is None:
        return (case.name, number(case.rate_per_s), NONE, NONE, NONE, NONE, "fails")
    times = [
        NONE if value is None else amount(value, Unit.SECONDS)
        for value in (case.ttft_p50_s, case.ttft_p99_s, case.itl_p99_s)
    ]
    return (
        case.name,
        number(case.rate_per_s),
        percent(case.attainment),
        *times,
        "holds" if case.holds else "fails",
    )


def effect_table(plan: Plan) -> Table:
    """What binds: the effect of each change on the highest rate."""
    names = ("change", "makes", "capacity", "")
    rows = tuple(
        (
            effect.change,
            effect.layout,
            NONE if effect.capacity is None else _change(effect.capacity),
            effect.note or ("" if effect.is_shown else "nothing shown"),
        )
        for effect in plan.effects
    )
    return Table(title=f"What binds {plan.recommended}", columns=names, rows=rows)


def _change(interval: Interval) -> str:
    return f"{signed_percent(interval.estimate)} {bracketed(interval, signed_percent)}".strip()


def cost_table(plan: Plan) -> Table:
    """At the traffic's rate and at capacity, in the unit of the price."""
    names = ("", "requests/s", "use", "a request", "1,000 requests", "10⁶ tokens in", "10⁶ tokens out")
    rows = tuple(
        (
            cost.name,
            number(cost.rate_per_s),
            percent(cost.use),
            _money(cost.per_request),
            _money(cost.per_thousand_requests),
            _money(cost.per_million_input),
            _money(cost.per_million_output),
        )
        for cost in plan.costs
    )
    note = f"At {_money(plan.price_per_hour or 0.0)} an hour for each accelerator, whether it works or not."
    return Table(title=f"Cost of {plan.recommended}", columns=names, rows=rows, note=note)


def _money(value: float) -> str:
    if value == 0:
        return "$0"
    if value >= 1:
        return f"${value:,.2f}"
    return f"${value:.3g}" if value >= 1e-4 else f"${value:.3e}"


def all_tables(plan: Plan, most_layouts: int | None = _MOST_LAYOUTS) -> list[Table]:
    """Those that have rows."""
    tables = (
        layout_table(plan, most_layouts),
        case_table(plan),
        effect_table(plan),
        cost_table(plan),
        memory_table(plan),
    )
    return [table for table in tables if table.rows]


def printed(plan: Plan, width: int = WIDTH) -> str:
    """What a terminal of `width` columns shows: sentences first, then tables."""
    return "\n".join(_lines(plan, width))


def _lines(plan: Plan, width: int) -> Iterator[str]:
    traffic = plan.traffic
    rate = "at any rate" if traffic.rate_per_s is None else f"{number(traffic.rate_per_s)} requests/s"
    yield from wrap(
        f"{plan.model}, {traffic.name}: {rate}, {traffic.input_tokens:,.0f} tokens in "
        f"({percent(traffic.reused_share)} reusable) and {traffic.output_tokens:,.0f} out on average",
        width,
        subsequent_indent="  ",
    )
    for warning in plan.warnings:
        yield from wrap(f"warning: {warning}", width, initial_indent="! ", subsequent_indent="  ")
    for finding in plan.findings:
        yield from wrap(finding, width, initial_indent="· ", subsequent_indent="  ")
    for table in all_tables(plan):
        yield ""
        yield table.title
        yield from _columns(table.columns, table.rows, width)
        if table.note:
            yield from wrap(table.note, width, initial_indent="  ", subsequent_indent="  ")
    yield ""
    yield from wrap(
        f"{plan.num_simulations:,} simulations of {plan.num_simulated_requests:,} requests; seed {plan.seed}; "
        f"{'; '.join(plan.times)}",
        width,
        subsequent_indent="  ",
    )


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Columns that do not fit come in a further part below, beside the first column again."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    is_left = [place == 0 or any(row[place][:1].isalpha() for row in rows) for place in range(len(names))]
    for part in _parts(widths, width):
        if part[1] > 1:
            yield ""
        for row in (names, *rows):
            cells = (
                row[place].ljust(widths[place]) if is_left[place] else row[place].rjust(widths[place])
                for place in part
            )
            yield ("  " + "  ".join(cells)).rstrip()


def _parts(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Places of the columns that fit beside the first one, two blanks before each; one at least."""
    part = [0]
    for place in range(1, len(widths)):
        if len(part) > 1 and sum(widths[each] + 2 for each in (*part, place)) > width:
            yield part
            part = [0]
        part.append(place)
    yield part
