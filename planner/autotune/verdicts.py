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
    """What is done, with which pools in mind (None: no others), and why."""

    action: Action
    change: Forecast | None
    why: str


class Circumstances(NamedTuple):
    """What a verdict goes by beside the prediction. `own_error` is the median error of recent predictions, None before
    one was measured."""

    traffic: PastTraffic
    pools: Pools
    settings: AutotuneSettings
    cool_down_left_s: float
    own_error: float | None

    @property
    def margin(self) -> float:
        """The hysteresis and the own error: a smaller gain may be none."""
        return self.settings.hysteresis + (self.own_error or 0.0)

    @property
    def margin_in_words(self) -> str:
        """What it is made of."""
        error = "not known yet" if self.own_error is None else f"{self.own_error:.0%}"
        return f"the hysteresis of {self.settings.hysteresis:.0%} and its own recent error ({error})"


def objective_of(stay: Forecast, change: Forecast | None, traffic: PastTraffic) -> Objective:
    """What a change would gain."""
    if stay.capacity_per_s < traffic.rate_per_s:
        return Objective.GOODPUT
    is_smaller = change is not None and change.split.size < stay.split.size
    return Objective.COST if is_smaller else Objective.HEADROOM


def gain_of(stay: Forecast, change: Forecast | None) -> float | None:
    """What the change has more of capacity, as a share; None without a change, or where there is no capacity now."""
    if change is None or stay.capacity_per_s <= 0:
        return None
    return change.capacity_per_s / stay.capacity_per_s - 1


def verdict_on(prediction: Prediction, given: Circumstances) -> Verdict:
    """More workers where they are too few, else other roles where that gains enough, else fewer where they do."""
    stay, change, resize = prediction.stay, prediction.change, prediction.resize
    if resize is not None and resize.split.size > stay.split.size:
        best, rate = change or stay, given.traffic.rate_per_s
        if _is_apart(best, resize):
            why = f"as many workers serve {best.capacity_per_s:.3g} requests/s at most, and {rate:.3g} come"
            return _permitted(resize, why, given)
    if change is not None:
        why_not = _why_not_better(stay, change, given)
        if not why_not:
            why = f"the gain is above {given.margin_in_words}, and the intervals do not overlap"
            return _permitted(change, why, given, idle_below_per_s=IDLE_SHARE * stay.capacity_per_s)
    else:
        why_not = "no other pools of as many workers serve more"
    is_smaller = resize is not None and resize.split.size < stay.split.size
    if resize is not None and is_smaller and (resize.low_per_s or 0.0) >= _spare_rate(given):
        share = _spare_rate(given) / given.traffic.rate_per_s
        why = f"fewer workers serve {share:.0%} of what comes: above it are twice {given.margin_in_words}"
        return _permitted(resize, why, given)
    return Verdict(Action.STAYED, change, why_not)


def _spare_rate(given: Circumstances) -> float:
    """What fewer workers must serve. More are wanted again below the traffic and one hysteresis: it does not flap."""
    return given.traffic.rate_per_s * (1 + given.settings.hysteresis + given.margin)


def _why_not_better(stay: Forecast, change: Forecast, given: Circumstances) -> str:
    gain = gain_of(stay, change)
    if change.capacity_per_s <= stay.capacity_per_s:
        return "no capacity is gained"
    if gain is not None and gain <= given.margin:
        return f"a gain of {gain:.0%} is not above {given.margin_in_words}"
    if not _is_apart(stay, change):
        return "the intervals of both capacities overlap"
    return ""


def _permitted(change: Forecast, why: str, given: Circumstances, idle_below_per_s: float = 0.0) -> Verdict:
    """It is worth while: whether it is done, too. Below a rate of `idle_below_per_s` no client would gain."""
    if (rate := given.traffic.rate_per_s) < idle_below_per_s:
        used = IDLE_SHARE * rate / idle_below_per_s
        why_not = f"only {used:.0%} of the capacity is used: no client would gain"
    elif given.settings.mode is not Mode.ACT:
        why_not = "the mode is advise"
    elif not (why_not := _why_impossible(given.pools, change.split)) and given.cool_down_left_s > 0:
        why_not = f"the cool-down ends in {given.cool_down_left_s:.0f} s"
    return Verdict(Action.ADVISED, change, why_not) if why_not else Verdict(Action.CHANGED, change, why)


def _is_apart(stay: Forecast, change: Forecast) -> bool:
    """Whether their intervals are; one that is not known reaches everywhere."""
    return change.low_per_s is not None and stay.high_per_s is not None and change.low_per_s > stay.high_per_s


def _why_impossible(pools: Pools, wanted: Split) -> str:
    if min(wanted) < 1:
        return f"{wanted} would leave a pool without a worker"
    if wanted.size != pools.present.size:
        return ""  # workers that keep their role can be started and drained
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
        return f"{now}; {recommendation.why}"
    if recommendation.objective is Objective.COST:
        gain = f"{change.split.size / stay.split.size - 1:+.0%}"
    else:
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
