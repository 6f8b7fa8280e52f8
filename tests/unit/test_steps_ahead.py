"""The next step is planned while one runs: what it becomes of the tokens, and whose blocks it keeps in place."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from support.jobs import EOS, GRAMMAR, job

from twinpool.decode_pool.scheduler import DecodeScheduler
from twinpool.decode_pool.steps import StepsUnderWay
from twinpool.engine.batch import StepBatch, StepOutput
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.prefix_chain import PrefixChain
from twinpool.request import Job, RequestKey
from twinpool.worker.core import AwaitedSlice, PlanAhead, StepDone, StepPlan
from twinpool.worker.step_thread import Grammars, StepResult, StepThread

BLOCK_SIZE = 4


class Bench:
    """Running sequences over a pool, each with the KV of its prompt and a first token."""

    def __init__(self, *jobs: Job, num_blocks: int = 12) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = DecodeScheduler(self.pool)
        for work in jobs:
            self.join(work)

    def join(self, work: Job) -> None:
        table = self.pool.try_reserve(self.pool.blocks_for(len(work.token_ids)))
        assert table is not None
        chain = PrefixChain(BLOCK_SIZE)
        chain.extend(work.token_ids)
        self.scheduler.join(work, table, chain, 50)

    def step(self) -> StepPlan:
        return StepPlan(StepBatch(tuple(self.scheduler.plan().slices)))

    def ahead(self, running: StepPlan, *leaving: RequestKey) -> PlanAhead:
        ahead = self.scheduler.plan_ahead(running, leaving)
        assert ahead is not None
        return ahead


def output(plan: StepPlan, token_id: int = 60) -> StepOutput:
    return StepOutput({chunk.key: token_id for chunk in plan.batch.slices}, 0.0)


def test_a_step_that_was_planned_ahead_is_the_one_that_would_have_been_planned_after() -> None:
    bench = Bench(
        job("a", 6, max_tokens=9, min_tokens=3), job("b", 3, max_tokens=9, presence_penalty=1.0, logprobs=2)
    )
    for token_id in range(60, 66):
        running = bench.step()
        ahead = bench.ahead(running)
        following = ahead.resolve(running, output(running, token_id))
        for chunk in running.batch.slices:
            bench.scheduler.complete(chunk, output(running, token_id))
        assert following == bench.step()


def test_who_ends_or_is_leaving_is_not_in_the_step_that_follows() -> None:
    last, ending, leaving = (
        job("last", 3, max_tokens=2),
        job("ending", 3, max_tokens=9),
        job("left", 3, max_tokens=9),
    )
    bench = Bench(last, ending, leaving, job("goes-on", 3, max_tokens=9))
    running = bench.step()
    ahead = bench.ahead(running, leaving.key)
    assert last.key not in ahead.keys
    tokens = output(running).token_ids | {ending.key: EOS}
    following = ahead.resolve(running, StepOutput(tokens, 0.0))
    assert following is not None
    assert [chunk.key.request_id for chunk in following.batch.slices] == ["goes-on"]


def test_who_cannot_go_on_is_not_in_the_step_that_follows_whatever_its_token() -> None:
    failed, other = job("failed", 3, max_tokens=9, grammar=GRAMMAR), job("goes-on", 3, max_tokens=9)
    bench = Bench(failed, other)
    running = bench.step()
    ahead = bench.ahead(running)
    assert failed.key in ahead.keys
    found = replace(output(running), failed={failed.key: "no token fits"})
    del found.token_ids[failed.key]
    following = ahead.resolve(running, found)
    assert following is not None
    assert [chunk.key.request_id for chunk in following.batch.slices] == ["goes-on"]


def test_who_joins_meanwhile_is_in_the_step_that_follows() -> None:
    bench = Bench(job("a", 3, max_tokens=9))
    running = bench.step()
    bench.join(job("b", 3, max_tokens=9))
    following = bench.ahead(running).resolve(running, output(running, 70))
    assert following is not None
    assert [tuple(chunk.token_ids) for chunk in following.batch.slices] == [(70,), (50,)]


def test_nothing_is_planned_ahead_where_somebody_would_have_to_give_way() -> None:
    bench = Bench(job("a", 3, max_tokens=9), num_blocks=1)
    running = bench.step()
    assert bench.scheduler.plan_ahead(running, ()) is None
    assert len(bench.scheduler) == 1


def test_a_plan_for_after_another_step_is_nothing_and_one_of_which_all_have_ended_too() -> None:
    bench = Bench(job("a", 3, max_tokens=9))
    running = bench.step()
    ahead = bench.ahead(running)
    (chunk,) = running.batch.slices
    later = StepPlan(StepBatch((replace(chunk, start=chunk.start + 1),)))
    assert ahead.resolve(later, output(later)) is None
    assert ahead.resolve(running, output(running, EOS)) is None


def test_a_sequence_is_in_use_until_no_step_can_have_it() -> None:
    bench = Bench(job("a", 3, max_tokens=9))
    running = bench.step()
    steps = StepsUnderWay()
    steps.begin(running)
    bench.join(joined := job("b", 3, max_tokens=9))
    assert joined.key not in steps
    ahead = steps.plan_ahead(lambda plan: bench.scheduler.plan_ahead(plan, ()))
    assert ahead is not None
    assert steps.plan_ahead(lambda _: None) is ahead, "nothing has changed"
    steps.changed()
    assert steps.plan_ahead(lambda _: None) is None
    assert joined.key in steps, "the one before may have begun"
    following = ahead.resolve(running, output(running))
    steps.end(StepDone(running, output(running), following))
    assert joined.key in steps
    assert following is not None
    steps.end(StepDone(following, output(following)))
    assert joined.key not in steps


class Runner:
    """Steps that begin and end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[StepBatch] = []
        self.may_end = threading.Semaphore(0)

    def run(self, batch: StepBatch, on_layer_done: object = None) -> StepOutput:  # noqa: ARG002
        self.begun.append(batch)
        assert self.may_end.acquire(timeout=10)
        return StepOutput({chunk.key: 60 for chunk in batch.slices}, 0.0)

    @property
    def grammars(self) -> Grammars:
        raise NotImplementedError


async def test_the_step_thread_goes_on_with_the_plan_ahead_and_ends_when_there_is_none() -> None:
    bench = Bench(job("a", 3, max_tokens=9))
    runner, results = Runner(), list[StepResult]()
    thread = StepThread(runner, 1, {}, results.append)
    first = bench.step()
    thread.offer(
        PlanAhead(StepPlan(StepBatch(())), (AwaitedSlice(job("stale", 3, max_tokens=9), 0, 3, (0,)),))
    )
    running = asyncio.create_task(thread.run(first))
    thread.offer(bench.ahead(first))
    runner.may_end.release(2)
    async with asyncio.timeout(10):
        await running
    thread.close()
    (then, last) = results
    assert [then.plan, last.plan] == [first, then.following]
    assert last.following is None, "what was offered followed the first step only"
    assert runner.begun == [result.plan.batch for result in results]
