"""The search itself: bounds say where it is worth while, short stretches rank layouts, replications decide.

Nothing is simulated twice, and nothing that cannot change the answer: a layout whose bound is below what another one of
its size serves, or that a short stretch shows to serve less, is passed over, and the study remembers why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.planner.plan.layouts import Layout
from twinpool.planner.plan.study import Pruned, Study, Why

MOST_TRIED = 8
"""Layouts of one kind and size, beside those that are climbed to."""
NEARLY = 0.97
"""Of the best rate: who does not serve that by a short stretch is worse."""
_WORTH_A_LOOK, _MOST_LOOKS = 0.9, 4
"""Of the highest bound: layouts with one above that are looked at, some of them, before one is searched."""
_LOOK_AT = (0.8, 0.4, 0.2, 0.1)
"""Of the highest bound: the rates of those looks, until one holds."""
_IDLE = 0.01
"""Of the bound."""
_MOST_PROBED = 3
"""Splits, to see whether one of a size serves a rate."""
_CLOSE = 0.05
"""A runner-up within this is a finalist, too."""


class SizeVerdict(StrEnum):
    """Whether a number of accelerators serves the traffic's rate, and how that is known."""

    BOUND = "no layout's bound reaches the rate"
    FAILS = "those with the highest bounds fail in a short stretch"
    SHORT = "one holds in a short stretch, and by all replications none does"
    SERVES = "one serves it"


@dataclass(slots=True)
class Search:
    """Finds the layout with the fewest accelerators that serves the traffic, and what serves most of as many.
    `sizes` says what was found of numbers of accelerators."""

    study: Study
    sizes: dict[int, SizeVerdict] = field(default_factory=dict)
    recommended: Layout | None = None
    finalists: list[Layout] = field(default_factory=list)

    def run(self) -> None:
        """From the fewest accelerators that serve the rate in a short stretch to the first that do by replications, at
        most the budget. Where nobody said a rate, or none serves it, the best of as many as the budget has workers for:
        TP degrees may leave accelerators over."""
        study = self.study
        wanted, budget = study.question.traffic.rate_per_s, study.question.budget
        budget = next((size for size in range(budget, 0, -1) if study.layouts(size)), budget)
        sizes = [budget] if wanted is None else self._able(wanted)
        at = 0 if wanted is None else self._fewest(sizes, wanted)
        if at == len(sizes):
            sizes, at = [budget], 0
        for size in sizes[at:]:
            if wanted is not None and self.sizes.get(size) is SizeVerdict.FAILS and size != budget:
                continue
            self.survey(size)
            self.recommended = study.best(self._of_size(size)) or self.recommended
            self.finalists = self._finalists(size)
            self.confirm(self.finalists)
            self.recommended = study.best(self.finalists) or self.recommended
            if wanted is None:
                return
            if study.serves(study.best(self.finalists), wanted):
                self.sizes[size] = SizeVerdict.SERVES
                return
            if self.sizes.get(size) is SizeVerdict.SERVES:
                self.sizes[size] = SizeVerdict.SHORT

    def best_known(self) -> Layout | None:
        """Of those whose rates are known, however well: with the fewest accelerators that serve the traffic, or of all
        if none does."""
        study = self.study
        wanted = study.question.traffic.rate_per_s
        serving = [layout for layout in study.rough if wanted is not None and study.serves(layout, wanted)]
        size = min((layout.num_accelerators for layout in serving), default=None)
        return study.best(layout for layout in study.rough if size in (None, layout.num_accelerators))

    # ── how many accelerators ───────────────────────────────────────────────────────────────────────────────

    def _able(self, wanted: float) -> list[int]:
        """Sizes within the budget of which a layout's bound reaches the rate, ascending."""
        able = []
        for size in range(1, self.study.question.budget + 1):
            found = self.study.layouts(size)
            if found and self.study.bound(found[0]).rate_per_s >= wanted:
                able.append(size)
            elif found:
                self.sizes[size] = SizeVerdict.BOUND
        return able

    def _fewest(self, sizes: Sequence[int], wanted: float) -> int:
        """The place of the smallest that serves the rate in a short stretch, their number if none does: from the first
        on with doubled strides, then by bisection, as if more accelerators never served less."""
        low, high, stride = -1, len(sizes), 1
        while high - low > 1:
            at = (low + high) // 2 if high < len(sizes) else min(low + stride, len(sizes) - 1)
            if self._some_serves(sizes[at], wanted):
                high = at
            else:
                low, stride = at, 2 * stride
            self.sizes[sizes[at]] = SizeVerdict.SERVES if high == at else SizeVerdict.FAILS
        return high

    def _some_serves(self, size: int, wanted: float) -> bool:
        """Whether a colocated layout does, or one of the splits with the highest bounds."""
        able = [each for each in self.study.layouts(size) if self.study.bound(each).rate_per_s >= wanted]
        splits = [layout for layout in able if layout.is_split][:_MOST_PROBED]
        colocated = [layout for layout in able if not layout.is_split][:MOST_TRIED]
        return any(self.study.holds(layout, wanted) for layout in (*splits, *colocated))

    # ── which of so many ────────────────────────────────────────────────────────────────────────────────────

    def survey(self, size: int) -> None:
        """Roughly, the best split and the best colocated layout of so many accelerators."""
        found = self.study.layouts(size)
        for kind in (True, False):
            ranked = [layout for layout in found if layout.is_split is kind]
            for layout in self._promising_first(ranked[:MOST_TRIED]):
                self._try(layout, ranked)
            self._climb(ranked)
            for layout in ranked:
                if not self._is_tried(layout):
                    self._pass_over(layout, ranked)

    def _promising_first(self, ranked: Sequence[Layout]) -> Sequence[Layout]:
        """Where several bounds are close, short stretches at lower and lower rates say with which of them to begin:
        with one that holds where others do not."""
        study = self.study
        most = max((study.bound(layout).rate_per_s for layout in ranked), default=0.0)
        close = [layout for layout in ranked if study.bound(layout).rate_per_s >= _WORTH_A_LOOK * most]
        del close[_MOST_LOOKS:]
        shares = dict.fromkeys(close, 0.0)
        for rate in (look * most for look in _LOOK_AT if len(close) > 1):
            shares = {layout: study.short_share(layout, rate) for layout in close}
            if max(shares.values()) >= study.question.attainment:
                break
        return sorted(close, key=lambda layout: -shares[layout]) + list(ranked[len(close) :])

    def _climb(self, ranked: Sequence[Layout]) -> None:
        """From the best to its neighbours, until none of them is better."""
        while (best := self.study.best(ranked)) is not None:
            near = [
                layout for layout in ranked if _are_neighbours(layout, best) and not self._is_tried(layout)
            ]
            if not near:
                return
            for layout in near:
                self._try(layout, ranked)

    def _try(self, layout: Layout, ranked: Sequence[Layout]) -> None:
        """Searches for its rate only if it serves nearly what the best does."""
        if self._is_tried(layout):
            return
        hurdle = self._hurdle(ranked)
        if hurdle is None:
            if any(layout in self.study.rough for layout in ranked) and not self._holds_when_idle(layout):
                self.study.rough[layout] = 0.0
            self.study.rough_rate(layout)
        elif self.study.bound(layout).rate_per_s < hurdle:
            self._pass_over(layout, ranked)
        elif self._fails(layout, hurdle):
            self.study.pruned[layout] = Pruned(hurdle, Why.STRETCH)
        else:
            self.study.rough_rate(layout)

    def _hurdle(self, ranked: Sequence[Layout]) -> float | None:
        """What a layout must serve to be searched; None as long as none serves anything."""
        best = self.study.best(ranked)
        return None if best is None else NEARLY * (self.study.rate(best) or 0.0)

    def _holds_when_idle(self, layout: Layout) -> bool:
        """Whether it does where hardly any request meets another one: to be asked where others do not."""
        return self.study.holds(layout, _IDLE * self.study.bound(layout).rate_per_s)

    def _fails(self, layout: Layout, rate: float) -> bool:
        """At that rate, or a lower one that was simulated."""
        study = self.study
        shares = study.lab.shares(study.short_setting(layout), study.question.slo)
        lower = [min(found) for at, found in shares.items() if at <= rate]
        return any(share < study.question.attainment for share in lower) or not study.holds(layout, rate)

    def _pass_over(self, layout: Layout, ranked: Sequence[Layout]) -> None:
        most, hurdle = self.study.bound(layout).rate_per_s, self._hurdle(ranked)
        why = Why.BOUND if hurdle is not None and most < hurdle else Why.LEFT_OUT
        self.study.pruned[layout] = Pruned(most, why)

    def _is_tried(self, layout: Layout) -> bool:
        return layout in self.study.rough or layout in self.study.pruned

    # ── which of the best ───────────────────────────────────────────────────────────────────────────────────

    def _of_size(self, size: int) -> list[Layout]:
        return [layout for layout in self.study.rough if layout.num_accelerators == size]

    def _finalists(self, size: int) -> list[Layout]:
        """The best split and the best colocated layout of so many accelerators, each with its runner-up if that is
        close."""
        rough = self.study.rough
        serving = [layout for layout in self._of_size(size) if rough[layout] > 0]
        ranked = sorted(serving, key=lambda layout: (-rough[layout], layout))
        found = []
        for kind in (True, False):
            able = [layout for layout in ranked if layout.is_split is kind]
            found += [layout for layout in able[:2] if rough[layout] >= (1 - _CLOSE) * rough[able[0]]]
        return found

    def confirm(self, layouts: Sequence[Layout]) -> None:
        """Each by all replications, whose first parts are there for all if it is interrupted; one that is shown to be
        worse than the best has no further ones."""
        study, question = self.study, self.study.question
        left = list(layouts)
        for replication in range(question.replications):
            for layout in left:
                most = study.bound(layout).rate_per_s
                start = study.rate(layout) or most
                found = study.lab.capacity(study.setting(layout), question.slo, replication, start, most)
                study.sure.setdefault(layout, []).append(found.rate)
            best = study.best(left)
            left = [layout for layout in left if layout == best or not self._is_worse(layout, best)]

    def _is_worse(self, layout: Layout, best: Layout | None) -> bool:
        """So far, with a confidence that allows for one such look after each replication (Bonferroni)."""
        question = self.study.question
        sure = 1 - (1 - question.confidence) / question.replications
        found = None if best is None else self.study.difference(best, layout, sure)
        return found is not None and found.high is not None and found.high < 0


def _are_neighbours(layout: Layout, other: Layout) -> bool:
    """Whether one worker changes its role between them, where all have the same degrees."""
    degrees = (layout.prefill_tp, layout.decode_tp) == (other.prefill_tp, other.decode_tp)
    return layout.is_split and other.is_split and degrees and abs(layout.prefill - other.prefill) == 1
