"""How often arms are loaded and in which order: interleaved, until the intervals are tight or the time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.measures import p99_itl_half_width
from twinpool.bench.comparison.stand import Trial
from twinpool.bench.comparison.workloads import Load
from twinpool.bench.comparison.yardstick import Yardstick
from twinpool.bench.serving.record import Run
from twinpool.bench.serving.workload import PlannedRequest

FEWEST = 3
"""Repetitions before an interval counts as tight."""
TIGHT = 0.05
"""Relative half-width of an interval that needs no more repetitions."""


_STRAINED = 1.25
"""So many times what it takes by the yardstick, whose gaps are those of several streams, a request takes."""


def lasts_s(requests: Sequence[PlannedRequest], by: Yardstick) -> float:
    """About how long these requests take on one arm."""
    return max(
        (request.at_s or 0.0)
        + _STRAINED * (request.input_tokens * by.prompt_token_s + (request.output_tokens or 0) * by.itl_s)
        for request in requests
    )


def forecast(one_s: float, left_s: float, most: int, wanted_s: float) -> str:
    """Whether the time will do: a repetition takes about `one_s`, `left_s` are left. `wanted_s`: for everything that
    this command does, with FEWEST repetitions of each load."""
    num_fit = min(most, max(1, int(left_s / one_s)))
    text = f"one repetition on all arms takes about {one_s:.0f} s, "
    if one_s > left_s:
        text += f"longer than the {max(0.0, left_s):.0f} s that are left; one is made all the same"
    else:
        text += f"so about {num_fit} will be made in {left_s:.0f} s"
    if num_fit >= min(FEWEST, most):
        return text
    return (
        f"{text}. Fewer than {FEWEST} can hardly show a difference: for {FEWEST} give --minutes "
        f"{math.ceil(wanted_s / 30) / 2:g}"
    )


@dataclass(slots=True)
class Trials:
    """All trials of one workload: `by_arm[name][r]` is repetition r, of which every arm has as many.

    `arms[0]` is the baseline.
    """

    load: Load
    arms: tuple[Arm, ...]
    by_arm: dict[str, list[Trial]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_arm = {arm.name: [] for arm in self.arms}

    def runs(self, arm: Arm) -> list[Run]:
        """An arm's repetitions."""
        return [trial.run for trial in self.by_arm[arm.name]]

    @property
    def num_repetitions(self) -> int:
        """How many there are."""
        return len(self.by_arm[self.arms[0].name])

    def pairs(self, other: Arm) -> list[tuple[Run, Run]]:
        """Runs of the same requests on the baseline and another arm."""
        return list(zip(self.runs(self.arms[0]), self.runs(other), strict=True))

    @property
    def is_tight(self) -> bool:
        """Whether every other arm's p99 ITL is known to a twentieth, relative to the baseline's."""
        return self.num_repetitions >= FEWEST and all(
            p99_itl_half_width(self.pairs(other), self.load.slo) <= TIGHT for other in self.arms[1:]
        )


def repeat(
    trials: Trials,
    run: Callable[[Arm, Sequence[PlannedRequest], str], Trial],
    *,
    seed: int,
    most: int,
    until: float,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda _text: None,
) -> None:
    """Loads all arms with the same requests, again and again with others, and adds each whole repetition to `trials`.

    Ends after `most` repetitions, when intervals are tight, or when another repetition as long as the longest so far
    would end after `until` on `clock`. The first is run in any case. What `run` raises ends it too, and the repetition
    in which that happens does not count.
    """
    load, arms = trials.load, trials.arms
    longest_s = 0.0
    for repetition in range(most):
        began = clock()
        if repetition and began + longest_s > until:
            say(f"{load.name}: the time is up")
            return
        requests = load.requests(seed + 1000 * repetition)
        slot = f"{load.name}-{repetition}"
        found = {arm.name: run(arm, requests, slot) for arm in order(arms, repetition)}
        for name, trial in found.items():
            trials.by_arm[name].append(trial)
        longest_s = max(longest_s, clock() - began)
        say(f"{load.name}: repetition {repetition + 1} took {clock() - began:.0f} s")
        if trials.is_tight:
            say(f"{load.name}: the intervals are tight")
            return


def order(arms: Sequence[Arm], repetition: int) -> list[Arm]:
    """Forth, then back, each pair of repetitions beginning one arm later: every arm comes first and last equally often,
    and what drifts slowly is the same for all."""
    shift = repetition // 2 % len(arms)
    turned = [*arms[shift:], *arms[:shift]]
    return turned[::-1] if repetition % 2 else turned
