"""What binds a layout, found by changing one thing at a time: a worker more, memory more, an objective less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from twinpool.bench.reports.model import Interval
from twinpool.bench.reports.words import percent
from twinpool.bench.serving.slo import Slo
from twinpool.config import Role
from twinpool.planner.plan.bounds import bound
from twinpool.planner.plan.experiments import Setting
from twinpool.planner.plan.layouts import Layout, LayoutSpace
from twinpool.planner.plan.rates import change_of
from twinpool.planner.plan.study import Study

MORE = 1.25
"""Of KV memory, or of what an objective allows."""
REPLICATIONS = 3
ENOUGH_KV = 0.7
"""Of a worker's blocks: if requests never hold more, nothing ever waits for blocks, and more of them change nothing."""
LEAST_CHANGE = 0.01
"""A smaller one changes nothing that matters, however sure it is."""


class Change(StrEnum):
    """What is changed."""

    PREFILL = "one more prefill worker"
    DECODE = "one more decode worker"
    COLOCATED = "one more worker"
    TO_PREFILL = "one more prefill worker in place of a decode worker"
    TO_DECODE = "one more decode worker in place of a prefill worker"
    KV = "a quarter more KV memory"
    ITL = "a quarter more ITL allowed"
    TTFT = "a quarter more TTFT allowed"


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change does to the highest rate, relatively (None: not known, or not tried: then `note` says why).
    `layout` is what it makes, if another."""

    change: Change
    capacity: Interval | None
    layout: str = ""
    note: str = ""

    @property
    def shown(self) -> float:
        """The effect as far as it is shown: 0 if the interval holds 0, or it is too small to matter."""
        if self.capacity is None or not self.capacity.excludes(0.0):
            return 0.0
        return self.capacity.estimate if abs(self.capacity.estimate) >= LEAST_CHANGE else 0.0


def perturb(study: Study, layout: Layout, found: list[Effect]) -> None:
    """Adds the effect of each change to `found`, as they come. The layout's own rates must be sure."""
    space, slo = study.space, study.question.slo
    for change in _changes(layout):
        match change:
            case Change.KV:
                most = _most_kv_share(study, layout)
                if most < ENOUGH_KV:
                    note = f"not tried: {percent(most)} were in use at most, up to the highest rate"
                    found.append(Effect(change, None, note=note))
                else:
                    found.append(_effect(study, layout, change, space=space.with_more_kv(MORE)))
            case Change.ITL:
                if slo.itl_p99_s is not None or slo.tpot_s is not None:
                    found.append(_effect(study, layout, change, slo=_looser(slo, "itl_p99_s", "tpot_s")))
            case Change.TTFT:
                if slo.ttft_s is not None:
                    found.append(_effect(study, layout, change, slo=_looser(slo, "ttft_s")))
            case _:
                found.append(_effect(study, layout, change, made=_changed(layout, change)))
    _exchange(study, layout, found)


def _exchange(study: Study, layout: Layout, found: list[Effect]) -> None:
    """Adds what as many accelerators serve with one worker taken from the pool that binds, for the other one."""
    gains = {effect.change: effect.shown for effect in found}
    more = max((Change.PREFILL, Change.DECODE), key=lambda change: gains.get(change, 0.0))
    if gains.get(more, 0.0) > 0 and layout.prefill_tp == layout.decode_tp:
        change = Change.TO_PREFILL if more is Change.DECODE else Change.TO_DECODE
        other = _changed(layout, change)
        if other is not None:
            found.append(_effect(study, layout, change, made=other))


def _changes(layout: Layout) -> Sequence[Change]:
    if layout.is_split:
        return (Change.PREFILL, Change.DECODE, Change.KV, Change.ITL, Change.TTFT)
    return (Change.COLOCATED, Change.KV, Change.ITL, Change.TTFT)


def _changed(layout: Layout, change: Change) -> Layout | None:
    workers = {
        Change.PREFILL: {"prefill": 1},
        Change.DECODE: {"decode": 1},
        Change.COLOCATED: {"colocated": 1},
        Change.TO_PREFILL: {"prefill": 1, "decode": -1},
        Change.TO_DECODE: {"prefill": -1, "decode": 1},
    }
    return layout.changed(**workers[change])


def _most_kv_share(study: Study, layout: Layout) -> float:
    """The largest share of a worker's blocks that requests held, whose KV the change is about, at rates that hold."""
    setting, question = study.setting(layout), study.question
    role = Role.DECODE if layout.is_split else Role.COLOCATED
    seen = study.lab.holding(setting, question.slo)
    return max((each.uses[role].most_kv_share for each in seen if role in each.uses), default=1.0)


def _effect(
    study: Study,
    layout: Layout,
    change: Change,
    *,
    made: Layout | None = None,
    space: LayoutSpace | None = None,
    slo: Slo | None = None,
) -> Effect:
    """Of another layout, space or objective, by the same requests as the layout's own rates."""
    own, to, objective = study.setting(layout), made or layout, slo or study.question.slo
    name = own.name if space is None else f"{own.name}, {change.value}"
    setting = Setting(
        to.name if made else name, (space or study.space).deployment(to), own.traffic, own.num_requests
    )
    most = bound(space or study.space, to, study.lengths, objective).rate_per_s
    expected = most / study.bound(layout).rate_per_s
    before = study.sure[layout][:REPLICATIONS]
    after: list[float] = []
    for replication, rate in enumerate(before):
        if after and after[-1] > 0 < before[replication - 1]:
            expected = after[-1] / before[replication - 1]
        found = (
            study.lab.capacity(setting, objective, replication, rate * expected, most)
            if rate * most > 0
            else None
        )
        after.append(0.0 if found is None else found.rate)
    capacity = change_of(before, after, study.question.confidence)
    return Effect(change, capacity, "" if made is None else made.name)


def _looser(slo: Slo, *names: str) -> Slo:
    values = {name: getattr(slo, name) for name in Slo.__struct_fields__}
    return Slo(**{name: v * MORE if name in names and v is not None else v for name, v in values.items()})
