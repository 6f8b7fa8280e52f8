"""Whether a prediction is acted on, and why (not). Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from twinpool.planner.autotune.settings import AutotuneSettings, Mode
from twinpool.planner.autotune.words import (
    Action,
    Forecast,
    Objective,
    PastTraffic,
    Pools,
    Prediction,
    Recommendation,
    Split,
)

IDLE_SHARE = 0.3
"""Of the capacity of the pools as they are: below that no client gains by more of it."""


class Verdict(NamedTuple):
    """What is done, and why."""

    action: Action
    why: str


def objective_of(stay: Forecast, traffic: PastTraffic) -> Objective:
    """What a change would gain."""
    return Objective.GOODPUT if stay.capacity_per_s < traffic.rate_per_s else Objective.HEADROOM


def gain_of(prediction: Prediction) -> float | None:
    """What the change has more of capacity, as a share; None without a change, or where there is no capacity now."""
    change, stay = prediction.change, prediction.stay
    if change is None or stay.capacity_per_s <= 0:
        return None
    return change.capacity_per_s / stay.capacity_per_s - 1


def verdict_on(
    prediction: Prediction,
    traffic: PastTraffic,
    pools: Pools,
    settings: AutotuneSettings,
    cool_down_left_s: float,
) -> Verdict:
    """The first reason that holds."""
    change, stay = prediction.change, prediction.stay
    if change is None:
        return Verdict(Action.STAYED, "no other pools of as many workers serve more")
    gain = gain_of(prediction)
    if change.capacity_per_s <= stay.capacity_per_s:
        return Verdict(Action.STAYED, "no capacity is gained")
    if gain is not None and gain <= settings.hysteresis:
        return Verdict(
            Action.STAYED, f"a gain of {gain:.0%} is not above the hysteresis of {settings.hysteresis:.0%}"
        )
    if not _is_apart(stay, change):
        return Verdict(Action.STAYED, "the intervals of both capacities overlap")
    if traffic.rate_per_s < IDLE_SHARE * stay.capacity_per_s:
        share = traffic.rate_per_s / stay.capacity_per_s
        return Verdict(Action.ADVISED, f"only {share:.0%} of the capacity is used: no client would gain")
    if settings.mode is not Mode.ACT:
        return Verdict(Action.ADVISED, "the mode is advise")
    if (why := _why_impossible(pools, change.split)) != "":
        return Verdict(Action.ADVISED, why)
    if cool_down_left_s > 0:
        return Verdict(Action.ADVISED, f"the cool-down ends in {cool_down_left_s:.0f} s")
    return Verdict(Action.CHANGED, "the gain is above the hysteresis, and the intervals do not overlap")


def _is_apart(stay: Forecast, change: Forecast) -> bool:
    """Whether their intervals are; one that is not known reaches everywhere."""
    return change.low_per_s is not None and stay.high_per_s is not None and change.low_per_s > stay.high_per_s


def _why_impossible(pools: Pools, wanted: Split) -> str:
    if min(wanted) < 1:
        return f"{wanted} would leave a pool without a worker"
    for role, giving, movable in (
        ("prefill", pools.present.prefill - wanted.prefill, pools.movable.prefill),
        ("decode", pools.present.decode - wanted.decode, pools.movable.decode),
    ):
        if giving > movable:
            return f"{giving} {role} workers would have to change, and {movable} can; `twinpool pools --json` says why"
    return ""


def describe(recommendation: Recommendation) -> str:
    """In a sentence."""
    stay, change = recommendation.stay, recommendation.change
    now = f"{stay.split} serves {recommendation.rate_per_s:.3g} requests/s, up to {_capacity(stay)}"
    if change is None:
        return f"{now}; no other pools of as many workers serve more"
    gain = "more than nothing" if recommendation.gain is None else f"{recommendation.gain:+.0%}"
    verb = {Action.CHANGED: "becomes", Action.ADVISED: "should become", Action.STAYED: "stays, not"}
    return (
        f"{now}; {verb[recommendation.action]} {change.split}, up to {_capacity(change)} "
        f"({recommendation.objective} {gain}): {recommendation.why}"
    )


def _capacity(forecast: Forecast) -> str:
    found = f"{forecast.capacity_per_s:.3g}"
    if forecast.low_per_s is None or forecast.high_per_s is None:
        return found
    return f"{found} [{forecast.low_per_s:.3g}, {forecast.high_per_s:.3g}]"
