"""One worker that prefills and decodes: both schedulers over one pool."""

from __future__ import annotations

from dataclasses import replace

from support.core_bench import LAYOUT, CoreBench
from support.jobs import done, job, messages, names

from twinpool.colocated_pool.core import ColocatedCore
from twinpool.config import SchedulerConfig
from twinpool.messages import Cancel, Dropped, Generate, PrefillReport, StepTokens
from twinpool.metrics import WorkerMetric
from twinpool.worker.core import Tick


class Bench(CoreBench[ColocatedCore]):
    """A colocated core."""

    def __init__(self, num_blocks: int = 20, **settings: float) -> None:
        config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        super().__init__(ColocatedCore(num_blocks, LAYOUT, config))

    def step(self, token: int = 50) -> list[object]:
        return messages(self.handle(done(self.plan(), token)))


def test_life_of_a_request_without_a_copy_between_prefill_and_decode() -> None:
    bench = Bench()
    bench.tell(Generate(job("a", 6, max_tokens=3)))
    plan = bench.plan()
    table = plan.batch.slices[0].block_table
    report, tokens = messages(bench.handle(done(plan)))
    assert isinstance(report, PrefillReport)
    assert isinstance(tokens, StepTokens)
    plan = bench.plan()
    (chunk,) = plan.batch.slices
    assert (list(chunk.token_ids), chunk.start, chunk.block_table) == ([50], 6, table)
    bench.handle(done(plan))
    (tokens,) = bench.step()
    assert isinstance(tokens, StepTokens)
    assert tokens.tokens[0].index == 2
    assert bench.core.pool.num_owned == 0


def test_decoding_sequences_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    bench = Bench(token_budget=6)
    bench.tell(Generate(job("a", 2)))
    bench.tell(Generate(job("b", 3, first=100)))
    bench.step()
    bench.tell(Generate(job("long", 9, first=200)))
    plans = []
    for _ in range(3):
        plan = bench.plan()
        plans.append([(c.key.request_id, len(c.token_ids)) for c in plan.batch.slices])
        bench.handle(done(plan))
    assert plans == [
        [("a", 1), ("b", 1), ("long", 4)],
        [("a", 1), ("b", 1), ("long", 4)],
        [("a", 1), ("b", 1), ("long", 1)],
    ]


def test_a_running_sequence_takes_blocks_of_started_prompts_before_those_of_sequences() -> None:
    bench = Bench(num_blocks=4, headroom_tokens=0, token_budget=2)
    bench.tell(Generate(job("a", 4)))
    bench.step()
    bench.step()
    bench.tell(Generate(job("prompt", 8, max_tokens=2, first=100)))
    steps = []
    while plan := bench.core.next_step(0.0):
        steps.append(names(plan))
        bench.handle(done(plan))
    assert steps[:7] == [["a", "prompt"]] * 4 + [["a"]] * 3
    assert {"prompt"} == {name for step in steps[7:] for name in step}
    assert bench.core.counters[WorkerMetric.PREEMPTIONS] == 0
    assert bench.core.pool.num_owned == 0


def test_a_preempted_sequence_is_told_to_the_coordinator() -> None:
    bench = Bench(num_blocks=3, headroom_tokens=0)
    bench.tell(Generate(job("old", 4)))
    bench.step()
    bench.tell(Generate(job("young", 4, first=100)))
    bench.step()
    assert names(bench.plan()) == ["old"]
    dropped = messages(bench.handle(Tick()))
    assert [(m.key.request_id, m.reason) for m in dropped if isinstance(m, Dropped)] == [
        ("young", "preempted")
    ]


def test_cancel_in_every_state_frees_everything() -> None:
    bench = Bench(token_budget=4)
    work = job("a", 10)
    bench.tell(Generate(work))
    assert messages(bench.tell(Cancel(work.key))) == [Dropped(work.key, "cancelled")]
    for num_steps in range(6):
        bench.tell(Generate(work))
        for _ in range(num_steps):
            bench.step()
        assert messages(bench.tell(Cancel(work.key))) == [Dropped(work.key, "cancelled")]
        assert bench.core.pool.num_owned == 0
        bench.tell(Generate(work))
        for _ in range(num_steps):
            bench.step()
        plan = bench.plan()
        assert bench.tell(Cancel(work.key)) == []
        assert messages(bench.handle(done(plan))) == [Dropped(work.key, "cancelled")]
        assert bench.core.pool.num_owned == 0


def test_a_request_that_may_outgrow_the_pool_is_refused() -> None:
    (dropped,) = messages(Bench(num_blocks=3).tell(Generate(job("a", 9, max_tokens=5))))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "refused"


def test_the_next_turn_of_a_chat_computes_only_what_is_new() -> None:
    bench = Bench()
    bench.tell(Generate(job("a", 6, max_tokens=8)))
    for _ in range(8):
        bench.step()
    chat = (*job("a", 6).token_ids, *[50] * 8, 1, 2)
    bench.tell(Generate(replace(job("b", 6, max_tokens=1), token_ids=chat)))
    report = bench.step()[0]
    assert isinstance(report, PrefillReport)
    assert (report.num_cached, report.num_computed) == (12, 4)
