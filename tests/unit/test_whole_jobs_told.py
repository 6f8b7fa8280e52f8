"""What a worker that runs whole jobs tells beside their tokens: log probabilities, and that one cannot go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.core_bench import LAYOUT, CoreBench
from support.jobs import GRAMMAR, done, job, messages, told

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.colocated_pool.hybrid import HybridCore, HybridDecodeCore, HybridPrefillCore
from twinpool.config import SchedulerConfig
from twinpool.engine.look_back import LookBack
from twinpool.messages import (
    Cancel,
    Dropped,
    Generate,
    PrefillReport,
    PromptLogprobs,
    StepTokens,
    Token,
)
from twinpool.metrics import WorkerMetric
from twinpool.request import Job, RequestKey
from twinpool.worker.core import Command, Event, StepPlan

CONFIG = SchedulerConfig(token_budget=5)
HYBRID = SchedulerConfig(token_budget=5, hybrid=True)
CORES: dict[str, Callable[[], ColocatedCore | HybridCore]] = {
    "colocated": lambda: ColocatedCore(20, LAYOUT, CONFIG),
    "hybrid decode": lambda: HybridDecodeCore(20, LAYOUT, "model", HYBRID, "life-1"),
    "hybrid prefill": lambda: HybridPrefillCore(20, LAYOUT, "model", HYBRID),
}


class Bench(CoreBench[ColocatedCore | HybridCore]):
    """A core that takes whole jobs, and what it has told."""

    def __init__(self, core: ColocatedCore | HybridCore) -> None:
        super().__init__(core)
        self.told: list[object] = []

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        self.told += messages(commands)
        return commands

    def end(self, plan: StepPlan, *failed: RequestKey) -> None:
        """The step has run; those in `failed` cannot go on."""
        self.handle(done(plan, failed=failed))

    def run(self) -> None:
        """Until nothing is left to do."""
        while plan := self.core.next_step(self.now):
            self.end(plan)

    @property
    def tokens(self) -> list[Token]:
        return [token for message in self.told if isinstance(message, StepTokens) for token in message.tokens]

    @property
    def dropped(self) -> list[Dropped]:
        return [message for message in self.told if isinstance(message, Dropped)]


@pytest.fixture(params=CORES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(CORES[request.param]())


def test_each_token_has_its_log_probabilities_and_the_prompts_come_once_before_the_first(
    bench: Bench,
) -> None:
    work = job("a", 12, max_tokens=3, logprobs=2, prompt_logprobs=1)
    bench.tell(Generate(work))
    bench.tell(Generate(job("plain", 3, max_tokens=2, first=5000)))
    bench.run()
    own = [m for m in bench.told if isinstance(m, PrefillReport | PromptLogprobs) and m.key == work.key]
    assert [type(message) for message in own] == [PrefillReport, PromptLogprobs]
    assert own[1] == PromptLogprobs(work.key, tuple(told(token, 1) for token in range(1001, 1012)))
    first = next(
        i for i, m in enumerate(bench.told) if isinstance(m, StepTokens) and m.tokens[-1].key == work.key
    )
    assert bench.told.index(own[1]) < first
    assert sum(isinstance(message, PromptLogprobs) for message in bench.told) == 1
    assert [t.logprobs for t in bench.tokens if t.key == work.key] == [told(50, 2)] * 3
    assert [t.logprobs for t in bench.tokens if t.key != work.key] == [None] * 2
    assert bench.core.pool.num_owned == 0


def test_a_prompt_of_one_token_has_none_to_tell_of_and_says_so(bench: Bench) -> None:
    bench.tell(Generate(job("a", 1, max_tokens=1, prompt_logprobs=0)))
    bench.run()
    assert [m.entries for m in bench.told if isinstance(m, PromptLogprobs)] == [()]


def test_a_resumed_attempt_tells_nothing_of_the_prompt(bench: Bench) -> None:
    bench.tell(Generate(job("a", 6, max_tokens=4, num_emitted=2, prompt_logprobs=0, logprobs=0)))
    bench.run()
    assert not [m for m in bench.told if isinstance(m, PromptLogprobs)]
    assert [(t.index, t.logprobs) for t in bench.tokens] == [(2, told(50, 0)), (3, told(50, 0))]


def test_a_job_looks_back_with_the_same_object_in_its_prompt_and_in_its_answer(bench: Bench) -> None:
    bench.tell(Generate(work := job("a", 12, max_tokens=4, frequency_penalty=0.5)))
    seen: list[LookBack | None] = []
    while plan := bench.core.next_step(0.0):
        seen += [chunk.look_back for chunk in plan.batch.slices]
        bench.end(plan)
    assert len(seen) > 4
    assert len(set(seen)) == 1
    assert seen[0] is not None
    assert seen[0].job is work


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_who_cannot_go_on_is_refused_and_releases_everything_while_others_go_on(
    bench: Bench, num_tokens: int
) -> None:
    work, other = job("a", 4, max_tokens=8, grammar=GRAMMAR), job("b", 4, max_tokens=6, first=5000)
    bench.tell(Generate(work))
    bench.tell(Generate(other))
    while len([token for token in bench.tokens if token.key == work.key]) < num_tokens:
        bench.end(bench.plan())
    while not bench.dropped:
        bench.end(bench.plan(), work.key)
    assert bench.dropped == [Dropped(work.key, "refused", "no token fits its grammar")]
    assert bench.core.counters[WorkerMetric.REFUSED] == 1
    bench.run()
    assert [t.index for t in bench.tokens if t.key == work.key] == list(range(num_tokens))
    assert [t.index for t in bench.tokens if t.key == other.key] == list(range(6))
    assert bench.core.pool.num_owned == 0


def test_who_is_cancelled_in_the_step_in_which_it_fails_is_only_cancelled(bench: Bench) -> None:
    work: Job = job("a", 4, grammar=GRAMMAR)
    bench.tell(Generate(work))
    plan = bench.plan()
    bench.tell(Cancel(work.key))
    bench.end(plan, work.key)
    assert bench.dropped == [Dropped(work.key, "cancelled")]
    assert bench.core.pool.num_owned == 0


def test_a_reason_of_any_length_fits_into_a_message(bench: Bench) -> None:
    bench.tell(Generate(work := job("a", 4, grammar=GRAMMAR)))
    finished = done(bench.plan(), failed=(work.key,))
    finished.output.failed[work.key] = "x" * 100_000
    (dropped,) = messages(bench.core.handle(finished, 0.0))
    assert isinstance(dropped, Dropped)
    assert len(dropped.detail) == 1000
