"""The accuracy document: what was compared, on which machine, how far apart, by which command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinpool.bench.serving.record import Run
from twinpool.planner.accuracy.comparing import (
    MEDIAN_TARGET,
    WORST_TARGET,
    Compared,
    errors_of,
    summary,
    table,
)
from twinpool.planner.accuracy.folder import Facts
from twinpool.planner.accuracy.layouts import LAYOUTS
from twinpool.planner.accuracy.loads import TimedLoad

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""What is between them is made by the program; the rest of the document is written by people."""


def measured_section(
    facts: Facts, loads: Sequence[TimedLoad], runs: Sequence[Run], compared: Sequence[Compared]
) -> str:
    """Markdown, markers included."""
    found = errors_of(compared)
    num_requests = sum(len(run.requests) for run in runs)
    verdict = "met" if found.are_within_targets else "not met"
    noise = [run.settings.get("noise", {}) for run in runs]
    lines = [
        BEGIN,
        f"{facts.model} on {facts.num_cores} cores of {facts.cpu}, {facts.started_at[:10]}: {len(runs)} runs,",
        f"{num_requests:,} requests, loads of about {facts.seconds:g} s, {_how_often(facts)}, seed {facts.seed}.",
        "Beside server and load generator, programs of this machine used at most "
        f"{_most(noise, 'others_share'):.1%} of the cores during a run;",
        f"the machine below it took at most {_most(noise, 'stolen_share'):.1%}.",
        f"What one core read from memory right before a run: {_pace(noise)}.",
        "",
        f"Median error {found.median:.1%} (target {MEDIAN_TARGET:.0%}), worst {found.worst:.1%} (target "
        f"{WORST_TARGET:.0%}): {verdict}.",
        "",
        *summary(compared),
        "",
        "Predicted / measured (predicted ÷ measured − 1 ± how far a run is from the mean of its repetitions):",
        "",
        *table(compared),
        "",
        "The loads:",
        "",
        "| load | requests | per second | SLO |",
        "|---|---|---|---|",
        *(f"| {load.name} | {len(load.shapes)} | {load.rate_per_s:.2f} | {load.slo} |" for load in loads),
        END,
    ]
    return "\n".join(lines)


def renewed(document: str, section: str) -> str:
    """The document with `section` in the place of the one before; at the end if it has none."""
    before, found, rest = document.partition(BEGIN)
    if not found:
        return document.rstrip("\n") + "\n\n" + section + "\n"
    return before + section + rest.partition(END)[2]


def _how_often(facts: Facts) -> str:
    more = [
        f"{each.name} {each.repetitions(facts.repetitions)}" for each in LAYOUTS if each.times_as_often > 1
    ]
    return f"{facts.repetitions} times each" + (f" ({', '.join(more)})" if more else "")


def _most(noise: Sequence[dict[str, Any]], name: str) -> float:
    return max((float(each.get(name, 0.0)) for each in noise), default=0.0)


def _pace(noise: Sequence[dict[str, Any]]) -> str:
    found = sorted(each["pace"]["memory_gbps"] for each in noise if "pace" in each)
    return f"{found[0]:.1f} to {found[-1]:.1f} GB/s" if found else "not known"
