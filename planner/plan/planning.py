"""From a question to a plan: the phases in their order, and what they come to, also if they were interrupted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.bench.reports.words import percent
from twinpool.planner.plan.experiments import Setting, Simulate
from twinpool.planner.plan.layouts import Layout, LayoutSpace
from twinpool.planner.plan.perturbing import Effect, perturb
from twinpool.planner.plan.result import Case, PoolUse
from twinpool.planner.plan.search import Search
from twinpool.planner.plan.study import Question, Study
from twinpool.planner.times.floor import refuse_faster_plan

UNSAID_USE = 0.8
"""Of the capacity: the rate that cases are told at where nobody said one."""
_MORE_TRAFFIC, _LONGER_PROMPTS = 0.2, 1.2
_CASE_REPLICATIONS = 2
"""Short stretches."""
_MAP_SHARE = 0.2
"""Of the effort: what the map may take beside what decides."""


@dataclass(slots=True)
class Planning:
    """A plan in the making. `run` may be interrupted by Ctrl-C; `plan` tells what is known by then."""

    question: Question
    space: LayoutSpace
    simulate: Simulate
    model: str = ""
    price_per_hour: float | None = None
    say: Callable[[str], None] = lambda _: None
    doubts: tuple[str, ...] = ()
    """Sentences: why the service times may not hold."""
    wants_map: bool = False
    """Whether further layouts of the map over prefill and decode workers are simulated."""
    study: Study = field(init=False)
    search: Search = field(init=False)
    effects: list[Effect] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    was_interrupted: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError if no layout can do it."""
        self.study = Study(self.question, self.space, self.simulate, self.say)
        self.search = Search(self.study)

    @property
    def recommended(self) -> Layout | None:
        """As well as it is known."""
        return self.search.recommended

    def run(self) -> None:
        """All phases, or those until Ctrl-C.

        Raises:
            AboveRoofline: what was found is beyond the hardware's data sheet.
        """
        study = self.study
        try:
            self.search.run()
            if self.recommended is not None and self.recommended in study.sure:
                perturb(study, self.recommended, self.effects)
                self._stress(self.recommended)
            if self.wants_map:
                self._fill()
        except KeyboardInterrupt:
            self.was_interrupted = True
            self.search.recommended = self.search.best_known()
        self._hold_against_roofline()

    def _stress(self, layout: Layout) -> None:
        """The traffic, more and less of it, longer prompts, and each role without one of its workers."""
        rate, own = self._asked_rate(layout), self.study.short_setting(layout)
        longer = self.question.traffic.longer(_LONGER_PROMPTS)
        more = percent(_MORE_TRAFFIC)
        self._case("the traffic", own, rate)
        self._case(f"{more} more traffic", own, rate * (1 + _MORE_TRAFFIC))
        self._case(f"{more} less traffic", own, rate * (1 - _MORE_TRAFFIC))
        self._case(
            f"prompts {percent(_LONGER_PROMPTS - 1)} longer",
            Setting(own.name, own.deployment, longer, own.num_requests),
            rate,
        )
        roles = ("prefill", "decode") if layout.is_split else ("colocated",)
        for role in roles:
            less = layout.changed(**{role: -1})
            name = f"one {role} worker lost"
            if less is None:
                note = f"nothing is served: no {role} worker is left"
                self.cases.append(Case(name=name, rate_per_s=rate, note=note))
            else:
                deployment = self.space.deployment(less)
                self._case(name, Setting(less.name, deployment, own.traffic, own.num_requests), rate)

    def _case(self, name: str, setting: Setting, rate: float) -> None:
        replications = range(_CASE_REPLICATIONS)
        found = self.study.lab.point(setting, self.question.slo, rate, replications)
        self.cases.append(
            Case(
                name=name,
                rate_per_s=rate,
                attainment=found.attainment,
                least_attainment=found.least_attainment,
                holds=found.attainment >= self.question.attainment,
                ttft_p50_s=_finite(found.ttft_p50_s),
                ttft_p99_s=_finite(found.ttft_p99_s),
                itl_p99_s=_finite(found.itl_p99_s),
                uses={role.value: PoolUse(*use) for role, use in found.uses.items()},
            )
        )

    def _asked_rate(self, layout: Layout) -> float:
        """What the layout is to serve."""
        said = self.question.traffic.rate_per_s
        return UNSAID_USE * (self.study.rate(layout) or 0.0) if said is None else said

    def _fill(self) -> None:
        """Further layouts of the map, the nearest to the best first, for a share of the effort."""
        lab, effort = self.study.lab, self.question.effort
        most = min(effort, lab.num_requests + _MAP_SHARE * effort)
        for layout in self.map_layouts():
            if lab.num_requests >= most:
                return
            if layout in self.study.layouts(layout.num_accelerators):
                self.study.rough_rate(layout)

    def map_layouts(self) -> list[Layout]:
        """All splits of the best one's TP degrees within the budget, the nearest to it first."""
        best = self.study.best(layout for layout in self.study.rough if layout.is_split)
        if best is None:
            return []
        found = [
            Layout(prefill, decode, 0, best.prefill_tp, best.decode_tp)
            for prefill in range(1, self.question.budget + 1)
            for decode in range(1, self.question.budget + 1)
        ]
        within = [layout for layout in found if layout.num_accelerators <= self.question.budget]
        return sorted(
            within, key=lambda each: (abs(each.prefill - best.prefill) + abs(each.decode - best.decode), each)
        )

    def _hold_against_roofline(self) -> None:
        study, lengths = self.study, self.study.lengths
        for layout in study.rough:
            floor = self.space.kinds[layout.decode_tp].floor
            if floor is not None:
                refuse_faster_plan(
                    self.question.attainment * (study.rate(layout) or 0.0),
                    layout.num_accelerators,
                    floor,
                    lengths.request,
                )


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
