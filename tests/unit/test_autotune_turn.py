"""The recorded turn: traffic goes from prompt-heavy to answer-heavy, and `act` follows, by the real simulator.

What is recorded is a trace made by a seed. Clients of each stretch of it are simulated on the pools of that time, and
the core hears of them as it would in a server; predictions are made as a server makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import pytest
from support.planned import Affine, space

from twinpool.bench.serving.datasets.shapes import Shape, own
from twinpool.bench.serving.slo import Slo
from twinpool.config import SchedulerConfig
from twinpool.planner.autotune.core import AutotuneCore
from twinpool.planner.autotune.predicting import Aim, predict
from twinpool.planner.autotune.settings import AutotuneSettings, Mode
from twinpool.planner.autotune.words import (
    Action,
    Arrived,
    ChangePools,
    Command,
    Ended,
    Event,
    Measured,
    Pools,
    Predict,
    Predicted,
    Recommendation,
    Split,
    Tick,
    Write,
)
from twinpool.planner.plan.layouts import Layout
from twinpool.planner.plan.search import Search
from twinpool.planner.plan.simulated import simulated
from twinpool.planner.plan.study import Question, Study
from twinpool.planner.plan.traffic import traffic_of
from twinpool.planner.simulator.driver import simulate

SLO = Slo(ttft_s=2.0, tpot_s=0.08)
ATTAINMENT = 0.9
WINDOW_S = COOL_DOWN_S = 60.0
TURNS_AT_S, ENDS_AT_S = 60.0, 240.0
STRETCH_S = 30.0
SPACE = replace(
    space(Affine(fixed_s=0.04, prompt_token_s=2e-3, sequence_s=2e-3), num_blocks=600),
    token_budgets=(),
    prefill=SchedulerConfig(token_budget=512),
    decode=SchedulerConfig(max_num_seqs=16),
)
"""A prefill worker computes 1.2 prompts of 400 tokens in a second, or 4.2 of 100; a decode worker 222 tokens."""


@dataclass(frozen=True)
class Phase:
    input_tokens: int
    output_tokens: int
    rate_per_s: float


PROMPT_HEAVY, ANSWER_HEAVY = Phase(400, 20, 1.75), Phase(100, 200, 1.75)


def trace(phase: Phase, start_s: float, end_s: float, seed: int) -> list[Shape]:
    """A Poisson process of requests whose lengths are spread by half to both sides."""
    dice, at_s, found = Random(seed), start_s, []
    while (at_s := at_s + dice.expovariate(phase.rate_per_s)) < end_s:
        spread = (
            max(2, round(n * dice.uniform(0.5, 1.5))) for n in (phase.input_tokens, phase.output_tokens)
        )
        num_input, num_output = spread
        found.append(Shape((own(len(found), num_input),), num_output, at_s))
    return found


def recorded(seed: int) -> list[Shape]:
    before = trace(PROMPT_HEAVY, 0.0, TURNS_AT_S, seed)
    return before + trace(ANSWER_HEAVY, TURNS_AT_S, ENDS_AT_S, seed + 1)


def planned_best(phase: Phase, size: int) -> Split:
    """What the planner calls best for such traffic."""
    traffic = traffic_of(trace(phase, 0.0, 120.0, seed=77))
    study = Study(Question(traffic, SLO, ATTAINMENT, size, effort=10_000), SPACE, simulated)
    Search(study).survey(size)
    best = study.best(study.rough)
    assert best is not None
    return Split(best.prefill, best.decode)


@dataclass
class Server:
    """A made server: stretches of the trace are simulated on the pools of their time, from an empty deployment."""

    core: AutotuneCore
    present: Split
    changes: list[tuple[float, Split]] = field(default_factory=list)
    lines: list[Recommendation | Measured] = field(default_factory=list)
    _now: float = 0.0

    def serve(self, shapes: list[Shape], until_s: float) -> None:
        start = 0.0
        while start < until_s:
            stretch = [shape for shape in shapes if start <= (shape.at_s or 0.0) < start + STRETCH_S]
            for at, event in self._events(stretch, start):
                self._feed(event, at)
            start += STRETCH_S
            self._feed(Tick(Pools(self.present, self.present)), start)

    def _events(self, stretch: list[Shape], start: float) -> list[tuple[float, Event]]:
        if not stretch:
            return []
        moved = [replace(shape, at_s=(shape.at_s or 0.0) - start) for shape in stretch]
        seen = simulate(SPACE.deployment(Layout(*self.present)), moved)
        events: list[tuple[float, Event]] = []
        for outcome in seen.outcomes:
            name = f"{start:g}-{outcome.index}"
            times, sent = outcome.times, outcome.sent_at_s
            gaps = sorted(later - earlier for earlier, later in pairwise(times))
            events.append((start + sent, Arrived(name, outcome.shape.input_tokens)))
            ended = Ended(
                name,
                len(times),
                is_completed=True,
                ttft_s=times[0] - sent,
                tpot_s=(times[-1] - times[0]) / (len(times) - 1),
                itl_p99_s=gaps[-1 - len(gaps) // 100] if gaps else None,
                e2e_s=times[-1] - sent,
            )
            # By the stretch's end all are told of: none is still there when the pools change.
            events.append((min(start + times[-1], start + STRETCH_S), ended))
        return sorted(events, key=lambda each: each[0])

    def _feed(self, event: Event, now: float) -> None:
        self._now = max(self._now, now)
        for command in self.core.handle(event, self._now):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Predict(ticket, traffic, present):
                found = predict(
                    traffic, present, SPACE, Aim(SLO, ATTAINMENT), simulated, replications=2, most_requests=60
                )
                self._feed(Predicted(ticket, found), self._now)
            case ChangePools(wanted):
                self.changes.append((self._now, wanted))
                self.present = wanted
            case Write(line):
                self.lines.append(line)


@pytest.fixture(scope="module")
def served() -> Server:
    settings = AutotuneSettings(Mode.ACT, SLO, ATTAINMENT, WINDOW_S, COOL_DOWN_S)
    server = Server(AutotuneCore(settings, 0.0), present=Split(3, 1))
    server.serve(recorded(seed=5), ENDS_AT_S)
    return server


def test_act_reaches_what_the_planner_calls_best_within_two_cool_downs(served: Server) -> None:
    after = planned_best(ANSWER_HEAVY, 4)
    assert after != Split(3, 1)
    reached_at = next(at for at, split in served.changes if split == after)
    assert TURNS_AT_S < reached_at <= TURNS_AT_S + 2 * COOL_DOWN_S


def test_it_never_flaps(served: Server) -> None:
    """Each change moves on in the same direction: no worker changes its role twice."""
    sizes = [3, *(split.prefill for _, split in served.changes)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    assert all(at > TURNS_AT_S for at, _ in served.changes)


def test_every_recommendation_whose_window_is_over_was_measured(served: Server) -> None:
    told = [line for line in served.lines if isinstance(line, Recommendation)]
    measured = {line.number: line for line in served.lines if isinstance(line, Measured)}
    changed = [line for line in told if line.action is Action.CHANGED]
    assert len(changed) == len(served.changes)
    for line in changed:
        assert line.gain is None or line.gain > 0.1
        assert measured[line.number].figures is not None
        assert measured[line.number].layout == str(line.in_force.split)
    assert len(told) - len(measured) <= 2
    assert served.core.medians()["attainment"] < 0.3
