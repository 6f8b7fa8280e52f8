"""What a plan says in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from twinpool.bench.reports.model import Interval
from twinpool.bench.reports.words import bracketed, percent, signed_percent
from twinpool.config import Role
from twinpool.planner.plan.bounds import Bound, Limit
from twinpool.planner.plan.perturbing import Change, Effect


class Reason(StrEnum):
    """Why a pool binds, as what follows "decode is"."""

    TTFT = "TTFT-bound"
    ITL = "ITL-bound"
    KV = "KV-bound"
    SLOTS = "bound by --max-num-seqs"
    BUDGET = "bound by the token budget"
    LINK = "bound by the links between workers"
    PROMPTS = "bound by the time of prompts"
    ONE_STEP = "bound by the time of one step"
    STEPS = "bound by the time of steps"


_CLOSED_FORM = {
    Limit.KV: Reason.KV,
    Limit.ITL: Reason.ITL,
    Limit.SLOTS: Reason.SLOTS,
    Limit.BUDGET: Reason.BUDGET,
    Limit.LINK: Reason.LINK,
    Limit.TIME: Reason.STEPS,
    Limit.PREFILL: Reason.PROMPTS,
    Limit.NOTHING: Reason.ONE_STEP,
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What binds a layout: the pool and why (None: none more than another), and the sentence."""

    pool: Role | None
    reason: Reason | None
    words: str


def constraint(is_split: bool, effects: Sequence[Effect], bounds: Sequence[Bound]) -> Constraint | None:
    """What the effects come to; where they do not tell why a pool is the one, its closed form does. None without
    effects."""
    by_change = {effect.change: effect for effect in effects}
    if not by_change:
        return None
    least_last = sorted(bounds, key=lambda each: -each.rate_per_s)
    limits = {bound.role: bound.limit for bound in least_last}
    if is_split:
        more = {Role.PREFILL: by_change.get(Change.PREFILL), Role.DECODE: by_change.get(Change.DECODE)}
        gains = {role: max(0.0, effect.shown) for role, effect in more.items() if effect is not None}
        best = max(gains, key=lambda role: gains[role], default=None)
        if best is None or not gains[best]:
            return Constraint(None, None, f"No pool alone binds: {_told(effects)}.")
        pool = best
    else:
        pool = Role.COLOCATED
    reason = _reason(pool, by_change, limits)
    subject = {Role.COLOCATED: "These workers are"}.get(pool, f"{pool.value.capitalize()} is")
    return Constraint(pool, reason, f"{subject} {reason}: {_told(_in_order(pool, effects))}.")


def _reason(pool: Role, by_change: Mapping[Change, Effect], limits: Mapping[Role, Limit]) -> Reason:
    tried = {Change.TTFT: Reason.TTFT}
    if pool is not Role.PREFILL:
        tried |= {Change.KV: Reason.KV, Change.ITL: Reason.ITL}
    gains = {reason: by_change[change].shown for change, reason in tried.items() if change in by_change}
    best = max(gains, key=lambda reason: gains[reason], default=None)
    if best is not None and gains[best] > 0:
        return best
    found = _CLOSED_FORM[limits[pool]] if pool in limits else Reason.STEPS
    # What was tried and showed nothing is not the reason, whatever the closed form says.
    return Reason.STEPS if found in gains else found


def _in_order(pool: Role, effects: Sequence[Effect]) -> list[Effect]:
    """One more of the pool's own workers first, then what one fewer does."""
    first = {
        Role.PREFILL: (Change.PREFILL, Change.TO_DECODE),
        Role.DECODE: (Change.DECODE, Change.TO_PREFILL),
        Role.COLOCATED: (Change.COLOCATED,),
    }[pool]
    return sorted(
        effects, key=lambda effect: first.index(effect.change) if effect.change in first else len(first)
    )


def _told(effects: Sequence[Effect]) -> str:
    return "; ".join(map(effect_words, effects))


def effect_words(effect: Effect) -> str:
    """Like "one more decode worker (3P6D) raises capacity by 12 % [9, 15]"."""
    what = effect.change.value + (f" ({effect.layout})" if effect.layout else "")
    if effect.capacity is None:
        return f"{what}: {effect.note or 'not known'}"
    if not effect.shown:
        return f"{what} changes nothing that shows {bracketed(effect.capacity, signed_percent)}".rstrip()
    verb = "raises" if effect.shown > 0 else "lowers"
    return f"{what} {verb} capacity by {percent(abs(effect.shown))} {_sizes(effect.capacity)}".rstrip()


def compared(best_split: str, best_colocated: str, change: Interval | None) -> str:
    """Whether splitting pays; `change` is the split's rate over the colocated one's, − 1."""
    if change is None:
        return f"Whether {best_split} or {best_colocated} serves more is not known."
    if not change.excludes(0.0):
        between = bracketed(change, signed_percent)
        return f"No difference shown between {best_split} and {best_colocated} {between}."
    size = f"{percent(abs(change.estimate))} {_sizes(change)}".rstrip()
    if change.estimate > 0:
        return f"Splitting pays: {best_split} serves {size} more than {best_colocated}."
    return f"Splitting loses: {best_split} serves {size} less than {best_colocated}."


def _sizes(change: Interval) -> str:
    """The interval's ends as sizes, the one nearer to 0 first."""
    low, high = change.low, change.high
    if change.estimate < 0:
        low, high = None if high is None else -high, None if low is None else -low
    return bracketed(Interval(abs(change.estimate), low, high), lambda end: percent(end).removesuffix(" %"))
