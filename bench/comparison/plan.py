"""How often arms are loaded and in which order: interleaved, until the intervals are tight or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.measures import P99_ITL, measures, seen
from twinpool.bench.comparison.stand import Interrupted, Trial
from twinpool.bench.comparison.statistics import Repetition, Scale, compare
from twinpool.bench.comparison.workloads import Load
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.workload import PlannedRequest

FEWEST = 3
"""Repetitions before an interval counts as tight."""
TIGHT = 0.05
"""Relative half-width of an interval that needs no more repetitions."""


@dataclass(slots=True)
class Trials:
    """All trials of one workload: `by_arm[name][r]` is repetition r."""

    load: Load
    by_arm: dict[str, list[Trial]] = field(default_factory=dict)
    was_interrupted: bool = False

    def runs(self, arm: str) -> list[Run]:
        """An arm's repetitions."""
        return [trial.run for trial in self.by_arm.get(arm, [])]

    @property
    def num_repetitions(self) -> int:
        """How many there are: each arm has them all."""
        return min((len(trials) for trials in self.by_arm.values()), default=0)

    def pairs(self, baseline: str, other: str) -> list[tuple[Run, Run]]:
        """Runs of the same requests on two arms."""
        return list(zip(self.runs(baseline), self.runs(other), strict=False))

    def is_tight(self, baseline: str) -> bool:
        """Whether every other arm's p99 ITL is known to a twentieth, relative to the baseline's."""
        if self.num_repetitions < FEWEST:
            return False
        for other in self.by_arm:
            if other == baseline:
                continue
            repetitions = [Repetition(seen(a, None), seen(b, None)) for a, b in self.pairs(baseline, other)]
            count = len(measures(self.load.slo))
            if compare(repetitions, P99_ITL.relative, Scale.RATIO, num_measures=count).half_width > TIGHT:
                return False
        return True


def repeat(
    arms: Sequence[Arm],
    load: Load,
    run: Callable[[Arm, Sequence[PlannedRequest], str], Trial],
    *,
    seed: int,
    most: int,
    until: float,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda _text: None,
) -> Trials:
    """Loads all arms with the same requests, again and again with others, each time beginning with another arm.

    Ends after `most` repetitions, when intervals are tight, or when another repetition as long as the longest so far
    would end after `until` on `clock`. The first is run in any case. `arms[0]` is the baseline. A repetition that is
    interrupted does not count, and is the last.
    """
    trials = Trials(load, {arm.name: [] for arm in arms})
    longest_s = 0.0
    for repetition in range(most):
        began = clock()
        if repetition and began + longest_s > until:
            break
        requests = load.requests(seed + 1000 * repetition)
        slot = f"{load.name}-{repetition}"
        try:
            found = {arm.name: run(arm, requests, slot) for arm in order(arms, repetition)}
        except Interrupted:
            trials.was_interrupted = True
            break
        for name, trial in found.items():
            trials.by_arm[name].append(trial)
        longest_s = max(longest_s, clock() - began)
        say(f"{load.name}: repetition {repetition + 1} took {clock() - began:.0f} s")
        if trials.is_tight(arms[0].name):
            break
    return trials


def order(arms: Sequence[Arm], repetition: int) -> list[Arm]:
    """Forth, then back, each pair of repetitions beginning one arm later: every arm comes first and last equally often,
    and what drifts slowly is the same for all."""
    shift = repetition // 2 % len(arms)
    turned = [*arms[shift:], *arms[:shift]]
    return turned[::-1] if repetition % 2 else turned
