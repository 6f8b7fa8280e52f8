"""Decides what to recommend, when to act on it, and holds every recommendation against what came. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from twinpool.planner.autotune.caution import Caution
from twinpool.planner.autotune.regrets import RECENT, Regrets, errors_of
from twinpool.planner.autotune.settings import AutotuneSettings
from twinpool.planner.autotune.verdicts import (
    Circumstances,
    Verdict,
    describe,
    gain_of,
    objective_of,
    verdict_on,
)
from twinpool.planner.autotune.window import LEAST_REQUESTS, NOTHING_CAME, OfferedLoad, Window
from twinpool.planner.autotune.words import (
    Action,
    Arrived,
    ChangePools,
    Command,
    Ended,
    Event,
    Figures,
    Forecast,
    Measured,
    NotChanged,
    Note,
    PastTraffic,
    Pools,
    Predict,
    Predicted,
    Prediction,
    Recommendation,
    Split,
    Tick,
    Unpredicted,
    Withdrawn,
    Write,
)

MOST_OPEN = 32
"""Recommendations that wait to be measured."""
ARRIVES_WITHIN_S, STARTS_WITHIN_S = 60.0, 600.0
"""A change that is not there after so long is given up: somebody else has changed the pools, or one was lost. One with
workers that start takes longer."""
_WAITS_FOR_ENDS_WINDOWS = 2.0
"""Windows after the measured one in which its last requests may end."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prediction that is under way."""

    ticket: int
    traffic: PastTraffic
    present: Split


@dataclass(slots=True)
class _Open:
    """A recommendation whose window is not over; it begins `since` (None: when the pools have changed)."""

    recommendation: Recommendation
    split: Split
    since: float | None


class AutotuneCore:
    """`handle(event, now)` returns commands. `now` is the coordinator's clock and never falls."""

    def __init__(self, settings: AutotuneSettings, started_at: float) -> None:
        self._settings = settings
        self._window = Window(settings.window_s, settings.slo, started_at)
        self._caution = Caution(settings.cool_down_s)
        self._regrets = Regrets()
        self._open: deque[_Open] = deque()
        self._asked: _Asked | None = None
        self._num_asked = 0
        self._next_at = started_at + settings.window_s / 2
        self._wanted: Split | None = None
        self._changed_at = started_at
        self._arrives_within_s = ARRIVES_WITHIN_S
        self._pools: Pools | None = None
        self._latest: Recommendation | None = None
        self._told: Split | None = None
        self._silent_about = ""
        self._out: list[Command] = []
        self.num_recommendations = 0
        self.num_changes = 0
        self.num_unpredicted = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """What follows from `event`."""
        match event:
            case Arrived():
                self._window.arrived(event, now)
            case Ended():
                self._window.ended(event, now)
            case Withdrawn():
                self._window.withdrawn(event, now)
            case Tick(pools):
                self._tick(pools, now)
            case Predicted(ticket, prediction):
                if (asked := self._take(ticket)) is not None:
                    self._recommend(asked, prediction, now)
            case Unpredicted(ticket, reason):
                if self._take(ticket) is not None:
                    self._not_predicted(reason)
            case NotChanged(reason):
                self._not_changed(reason)
        out, self._out = self._out, []
        return out

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, pools: Pools, now: float) -> None:
        self._pools = pools
        self._arrive(pools, now)
        self._measure(now)
        if now < self._next_at or self._asked is not None or self._wanted is not None or pools.unsettled:
            return
        self._next_at = now + self._settings.window_s / 2
        if (traffic := self._window.traffic(now)) is not None:
            self._num_asked += 1
            self._asked = _Asked(self._num_asked, traffic, pools.present)
            self._out.append(Predict(self._num_asked, traffic, pools.present))

    def _arrive(self, pools: Pools, now: float) -> None:
        """Whether a change that was begun is there."""
        if self._wanted is None:
            return
        if pools.present == self._wanted and not pools.unsettled:
            for each in self._open:
                if each.since is None:
                    each.since = now
        elif now - self._changed_at <= self._arrives_within_s:
            return
        else:
            self._say(
                f"{self._wanted} is not there after {self._arrives_within_s:g} s: {pools.unsettled or pools.present}"
            )
            self._void("the pools did not become what was wanted")
        self._wanted = None

    def _take(self, ticket: int) -> _Asked | None:
        """The prediction that was waited for, if it is this one."""
        asked = self._asked
        if asked is None or asked.ticket != ticket:
            return None
        self._asked = None
        return asked

    def _not_predicted(self, reason: str) -> None:
        self.num_unpredicted += 1
        if reason != self._silent_about:  # once, not at each try
            self._silent_about = reason
            self._out.append(Note(f"autotune: nothing is recommended: {reason}", is_fault=True))

    # ── recommending and acting ─────────────────────────────────────────────────────────────────────────────

    def _recommend(self, asked: _Asked, prediction: Prediction, now: float) -> None:
        pools = self._pools
        if pools is None or pools.present != asked.present or pools.unsettled or self._wanted is not None:
            return  # it is about pools that are no more
        self._silent_about = ""
        own_error = self._regrets.median_error(RECENT)
        cool_down_left_s = self._caution.left_s(now)
        verdict = verdict_on(
            prediction, Circumstances(asked.traffic, pools, self._settings, cool_down_left_s, own_error)
        )
        stay, change = prediction.stay, verdict.change
        self.num_recommendations += 1
        recommendation = Recommendation(
            number=self.num_recommendations,
            num_requests=len(asked.traffic.requests),
            rate_per_s=asked.traffic.rate_per_s,
            mean_input=asked.traffic.mean_input,
            mean_output=asked.traffic.mean_output,
            objective=objective_of(stay, change, asked.traffic),
            stay=stay,
            change=change,
            gain=gain_of(stay, change),
            own_error=own_error,
            action=verdict.action,
            why=verdict.why,
        )
        self._latest = recommendation
        self._out.append(Write(recommendation))
        self._tell(recommendation, verdict)
        self._keep(_Open(recommendation, recommendation.in_force.split, now))
        if verdict.action is Action.CHANGED and change is not None:
            self._change(pools.present, change, now)

    def _change(self, present: Split, change: Forecast, now: float) -> None:
        self._void("the pools were changed meanwhile", but_latest=True)
        self._open[-1].since = None
        self._wanted, self._changed_at = change.split, now
        self._arrives_within_s = ARRIVES_WITHIN_S if change.split.size <= present.size else STARTS_WITHIN_S
        self._caution.changed(present, change.split, now)
        self.num_changes += 1
        self._out.append(ChangePools(change.split))

    def _not_changed(self, reason: str) -> None:
        """The cool-down goes on all the same: it will not be otherwise at once."""
        if self._wanted is None:
            return
        self._wanted = None
        self.num_changes -= 1
        self._say(f"the pools were not changed: {reason}")
        self._void(f"the pools were not changed: {reason}")

    def _tell(self, recommendation: Recommendation, verdict: Verdict) -> None:
        """In the server's log only if it is another one than before."""
        wanted = None if recommendation.change is None else recommendation.change.split
        if verdict.action is Action.CHANGED or (wanted is not None and wanted != self._told):
            self._out.append(Note(f"autotune: {describe(recommendation)}"))
        self._told = wanted

    def _say(self, text: str) -> None:
        self._out.append(Note(f"autotune: {text}", is_fault=True))

    # ── what came of it ─────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, opened: _Open) -> None:
        if len(self._open) == MOST_OPEN:
            self._close(self._open.popleft(), None, 0, NOTHING_CAME, "too many recommendations wait")
        self._open.append(opened)

    def _measure(self, now: float) -> None:
        """Those whose window is over, and those that nothing can be said of any more."""
        pools, window_s = self._pools, self._settings.window_s
        if pools is not None and self._wanted is None:
            others = [each for each in self._open if each.since is not None and each.split != pools.present]
            for each in others:
                self._open.remove(each)
                self._close(each, None, 0, NOTHING_CAME, f"the pools have become {pools.present}")
        while self._open and (since := self._open[0].since) is not None:
            until = since + window_s
            waited_s = now - until
            if waited_s < 0:
                return
            is_settled = self._window.is_over(since, until) or self._window.is_being_forgotten(since)
            if not is_settled and waited_s < _WAITS_FOR_ENDS_WINDOWS * window_s:
                return
            figures, count = self._window.figures(since, until)
            why = "" if figures is not None else "nothing came"
            self._close(self._open.popleft(), figures, count, self._window.load(since, until), why)

    def _close(self, each: _Open, figures: Figures | None, count: int, load: OfferedLoad, why: str) -> None:
        told, errors = each.recommendation, {}
        foreseen = OfferedLoad(told.rate_per_s, told.mean_input, told.mean_output)
        if figures is not None and not load.is_like(foreseen):
            why = "other traffic came than was predicted for"
        elif figures is not None:
            errors = errors_of(told.in_force.figures, figures)
            self._regrets.add(errors)
        self._out.append(
            Write(
                Measured(
                    number=told.number,
                    layout=str(each.split),
                    num_requests=count,
                    rate_per_s=load.rate_per_s,
                    mean_input=load.mean_input,
                    mean_output=load.mean_output,
                    figures=figures,
                    errors=errors,
                    why=why,
                )
            )
        )

    def _void(self, why: str, *, but_latest: bool = False) -> None:
        """Nothing can be said of those that wait to be measured."""
        latest = self._open.pop() if but_latest and self._open else None
        while self._open:
            self._close(self._open.popleft(), None, 0, NOTHING_CAME, why)
        if latest is not None:
            self._open.append(latest)

    # ── for people ──────────────────────────────────────────────────────────────────────────────────────────

    def medians(self) -> dict[str, float]:
        """The median errors by figure, see `Regrets`."""
        return self._regrets.medians()

    def status(self, now: float) -> dict[str, Any]:
        """As JSON values, for operators."""
        latest = self._latest
        return {
            "mode": self._settings.mode.value,
            "objectives": str(self._settings.slo),
            "recommendations": self.num_recommendations,
            "measured": self._regrets.num_measured,
            "changes": self.num_changes,
            "unpredicted": self.num_unpredicted,
            "cool_down_left_s": round(self._caution.left_s(now), 1),
            "changing_to": None if self._wanted is None else str(self._wanted),
            "median_error": self._regrets.median_error(),
            "recent_error": self._regrets.median_error(RECENT),
            "workers": None if self._settings.workers is None else list(self._settings.workers),
            "median_errors": self._regrets.medians(),
            "latest": None if latest is None else describe(latest),
            "recommended": None if latest is None or latest.change is None else str(latest.change.split),
            "why_nothing": self._silent_about or self._waits_for(now),
        }

    def _waits_for(self, now: float) -> str:
        if self._pools is not None and self._pools.unsettled:
            return f"it waits until the pools are settled: {self._pools.unsettled}"
        if self._asked is None and self._window.traffic(now) is None:
            return (
                f"it waits for traffic: {LEAST_REQUESTS} requests, of which the last came within the window"
            )
        return ""

    @property
    def num_measured(self) -> int:
        """Recommendations whose prediction was held against what came."""
        return self._regrets.num_measured
