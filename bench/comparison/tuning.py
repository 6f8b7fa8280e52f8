"""The chunk size of a colocated baseline, found on the workload that it is going to be compared on.

A baseline with a bad token budget is a straw man: too large a chunk stalls the streams beside it, too small a one reads
all weights for little. Each candidate gets the same short load; the best has the highest goodput and, of those within a
tenth of that, the lowest p99 ITL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.measures import GOODPUT, P99_ITL, seen
from twinpool.bench.comparison.stand import Trial
from twinpool.bench.reports.model import Table
from twinpool.bench.serving.slo import Slo

BUDGETS = (64, 128, 256)
"""Tokens. Below, chunks read all weights for little on any machine; above, one chunk is a long prompt by itself."""
_AS_GOOD = 0.9


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate and what it reached."""

    arm: Arm
    token_budget: int
    goodput_per_s: float
    p99_itl_s: float


def tune(
    arm: Arm, slo: Slo, try_out: Callable[[Arm], Trial], budgets: Sequence[int] = BUDGETS
) -> tuple[Arm, list[Tried]]:
    """The best of `arm` with each budget, and all that were tried. `try_out` runs the same load on each."""
    tried = []
    for budget in budgets:
        candidate = arm.with_token_budget(budget)
        requests = seen(try_out(candidate).run, slo)
        tried.append(Tried(candidate, budget, GOODPUT.of(requests), P99_ITL.of(requests)))
    return best(tried).arm, tried


def best(tried: Sequence[Tried]) -> Tried:
    """Of those whose goodput is about the highest, the one with the lowest p99 ITL (NaN, no token: the last choice)."""
    enough = _AS_GOOD * max(each.goodput_per_s for each in tried)
    good = [each for each in tried if each.goodput_per_s >= enough]
    return min(good, key=lambda each: (each.p99_itl_s != each.p99_itl_s, each.p99_itl_s))


def tuning_table(tried: Sequence[Tried]) -> tuple[Table, ...]:
    """What each candidate reached; nothing if none was tried."""
    if not tried:
        return ()
    rows = tuple(
        (each.arm.name, f"{each.goodput_per_s:.2f}", f"{each.p99_itl_s * 1e3:.1f}") for each in tried
    )
    return (
        Table(
            title="How the baseline was tuned",
            columns=("arm", "goodput, requests/s", "p99 ITL, ms"),
            rows=rows,
            note="One run of the same requests each; of those within a tenth of the best goodput, the lowest p99 ITL.",
        ),
    )
