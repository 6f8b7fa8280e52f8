"""In which order a profile runs its steps, and which of them count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest

from twinpool.bench.engine.floors import Piece
from twinpool.planner.profile import engine_runs
from twinpool.planner.profile.cases import Part, StepCase, StepPlan
from twinpool.planner.profile.engine_runs import BURST, Engine, Sampler

DECODES = tuple(StepCase(Part.DECODE, (40,) * batch) for batch in (1, 2, 3, 4))
PROMPT = StepCase(Part.PROMPT, (), ((64, 0),))
PLAN = StepPlan(
    alone=(*DECODES, PROMPT), busy=(), sleeping=(), row_knots=(1, 64), neighbour_decode=DECODES[0],
    neighbour_prompt=PROMPT, least_rounds=2, most_s=0.0,
)  # fmt: skip
STEP_S = 0.005


class MadeTime:
    """In place of the module `time`: it passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def made_time(monkeypatch: pytest.MonkeyPatch) -> MadeTime:
    made = MadeTime()
    monkeypatch.setattr(engine_runs, "time", made)
    return made


class CountedEngine(Engine):
    """Runs nothing, which takes `STEP_S`, and remembers the batch of each row of steps and how many it had."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def seconds(self, pieces: Sequence[Piece], times: int) -> tuple[float, ...]:
        self.rows.append((0 if pieces[0].count > 1 else len(pieces), times))
        engine_runs.time.sleep(STEP_S)
        return (STEP_S,) * times


def warmed(engine: CountedEngine) -> list[int]:
    """The batches of decode before whose row others ran that do not count."""
    return [batch for (batch, times), _ in groupby(engine.rows) if times == 1]


def test_steps_of_decode_follow_each_other_and_only_the_first_ones_after_something_else_are_warmed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_runs, "WARM_S", 4 * STEP_S)
    engine = CountedEngine()
    sampler = Sampler(PLAN, lambda _: engine, lambda mine: mine)
    sampler.go_on(0.0, 2)
    counted = [batch for batch, times in engine.rows if times == 1 + BURST]
    assert len(counted) == 2 * len(PLAN.alone)
    rows = [list(row) for is_decode, row in groupby(counted, bool) if is_decode]
    assert sum(map(len, rows)) == 2 * len(DECODES)
    assert len(rows) <= 2, "those of a round follow each other"
    assert warmed(engine) == [row[0] for row in rows], "once in each row, after the prompt"
    assert sum(times == 1 for _, times in engine.rows) >= len(rows)
    assert all(sample.num_runs == 2 * BURST for sample in sampler.samples())


def test_each_round_has_all_cases_in_an_order_of_its_own() -> None:
    engine = CountedEngine()
    Sampler(PLAN, lambda _: engine, None).go_on(0.0, 4)
    batches = [batch for batch, _ in engine.rows]
    rounds = [
        tuple(batches[first : first + len(PLAN.alone)]) for first in range(0, len(batches), len(PLAN.alone))
    ]
    assert {tuple(sorted(each)) for each in rounds} == {(0, 1, 2, 3, 4)}
    assert len(set(rounds)) == 4


def test_a_slice_that_begins_within_decode_warms_up_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_runs, "WARM_S", 4 * STEP_S)
    engine = CountedEngine()
    sampler = Sampler(PLAN, lambda _: engine, lambda mine: mine)
    begun = []
    for _ in PLAN.alone:
        seen = len(engine.rows)
        sampler.go_on(STEP_S)  # one case, and somebody else has the machine until the next
        begun.append(engine.rows[seen])
    assert sorted(begun) == [(0, 1 + BURST), (1, 1), (2, 1), (3, 1), (4, 1)]


def test_steps_of_a_worker_that_has_prompts_among_them_count_as_they_come() -> None:
    engine = CountedEngine()
    Sampler(PLAN, lambda _: engine, None).go_on(0.0, 2)
    assert len(engine.rows) == 2 * len(PLAN.alone)
    assert {times for _, times in engine.rows} == {1 + BURST}
