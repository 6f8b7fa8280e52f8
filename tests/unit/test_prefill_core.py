"""The prefill worker's decisions, step by step; every story ends with everything free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.jobs import EOS, GRAMMAR, done, job, messages, names, told
from support.prefill_bench import Bench

from twinpool.messages import (
    Cancel,
    Dropped,
    Prefill,
    PrefillReport,
    PromptLogprobs,
    Renew,
    Seal,
    SealAck,
    StepTokens,
)
from twinpool.request import FinishReason, RequestKey
from twinpool.worker.core import (
    BlockPush,
    FinishPush,
    Push,
    PushFinished,
    PushStopped,
    StopPush,
    Tick,
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.assert_empty()


def test_life_of_a_job_that_is_granted_before_it_is_computed(bench: Bench) -> None:
    # 1. the job comes, then room is granted
    work = job("a", 10)
    bench.start(work)
    assert bench.grant(work) == []
    # 2. the step pushes, layer by layer, the blocks that it fills
    plan = bench.plan()
    table = plan.batch.slices[0].block_table
    assert plan.pushes == (BlockPush(9, "decode-0", tuple(table), (100, 101, 102)),)
    # 3. the first token goes out at once, and the pushes are to be finished
    bench.now = 0.5
    commands = bench.handle(done(plan))
    report, tokens = messages(commands)
    assert report == PrefillReport(work.key, 0.0, 0.5, 0, 10, 1)
    assert isinstance(tokens, StepTokens)
    assert (tokens.tokens[0].index, tokens.tokens[0].token_id, tokens.tokens[0].finish) == (0, 50, None)
    assert commands[-1] == FinishPush(9, "decode-0", tuple(table))
    # 4. handed over: sealed with a manifest
    (seal,) = messages(bench.handle(PushFinished(9, (1, 2, 3), 768, 0.1)))
    assert isinstance(seal, Seal)
    assert (seal.manifest.block_ids, seal.manifest.digests) == ((100, 101, 102), (1, 2, 3))
    assert (seal.manifest.num_tokens, seal.manifest.first_token, seal.manifest.num_bytes) == (10, 50, 768)
    assert bench.num_held == 3
    # 5. verified: the blocks come back
    assert bench.hear(SealAck(work.key, 9)) == []
    assert bench.num_held == 0


def test_a_grant_during_the_step_pushes_its_blocks_after_the_step(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    plan = bench.plan()
    assert plan.pushes == ()
    assert bench.grant(work) == []
    push, finish = bench.handle(done(plan))[-2:]
    assert isinstance(push, Push)
    assert push.push.target_blocks == (100, 101)
    assert isinstance(finish, FinishPush)
    bench.handle(PushFinished(9, (1, 2), 1, 0.1))
    bench.hear(SealAck(work.key, 9))


def test_a_parked_prompt_is_pushed_when_decode_grants(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.handle(done(bench.plan()))
    assert bench.core.stats().leased_blocks == 2
    push, finish = bench.grant(work)
    assert isinstance(push, Push)
    assert isinstance(finish, FinishPush)
    bench.handle(PushFinished(9, (1, 2), 1, 0.1))
    bench.hear(SealAck(work.key, 9))


def test_a_chunked_prompt_pushes_each_block_in_the_step_that_completes_it() -> None:
    bench = Bench(token_budget=5)
    work = job("a", 12)
    bench.start(work)
    bench.grant(work)
    pushed = []
    for _ in range(3):
        plan = bench.plan()
        pushed.append([push.target_blocks for push in plan.pushes])
        bench.handle(done(plan))
    assert pushed == [[(100,)], [(101,)], [(102,)]]


def test_blocks_that_decode_holds_are_not_sent(bench: Bench) -> None:
    work = job("a", 10)
    bench.start(work)
    bench.grant(work, num_cached=2)
    plan = bench.plan()
    assert [push.target_blocks for push in plan.pushes] == [(102,)]
    assert bench.handle(done(plan))[-1] == FinishPush(9, "decode-0", tuple(plan.pushes[0].source_blocks))
    (seal,) = messages(bench.handle(PushFinished(9, (3,), 1, 0.1)))
    assert isinstance(seal, Seal)
    assert seal.manifest.block_ids == (102,)
    bench.hear(SealAck(work.key, 9))


def test_when_decode_holds_every_block_nothing_is_sent_and_it_is_sealed_at_once(bench: Bench) -> None:
    work = job("a", 8)
    bench.start(work)
    bench.grant(work, num_cached=2)
    plan = bench.plan()
    assert plan.pushes == ()
    seal = messages(bench.handle(done(plan)))[-1]
    assert isinstance(seal, Seal)
    assert (seal.manifest.block_ids, seal.manifest.num_bytes) == ((), 0)
    bench.hear(SealAck(work.key, 9))


@pytest.mark.parametrize(("max_tokens", "token"), [(1, 50), (8, EOS)])
def test_an_answer_of_one_token_is_never_handed_over(bench: Bench, max_tokens: int, token: int) -> None:
    work = job("a", 6, max_tokens=max_tokens)
    bench.start(work)
    _, tokens = messages(bench.handle(done(bench.plan(), token)))
    assert isinstance(tokens, StepTokens)
    assert tokens.tokens[0].finish is (FinishReason.LENGTH if max_tokens == 1 else FinishReason.STOP)
    assert bench.num_held == 0


def test_an_answer_that_ends_while_blocks_travel_keeps_them_until_the_push_has_stopped(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    assert bench.handle(done(bench.plan(), EOS))[-1] == StopPush(9, "decode-0")
    assert bench.num_held == 2
    assert bench.handle(PushStopped(9)) == []


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_log_probabilities_of_the_prompt_are_gathered_and_told_before_the_first_token(
    max_tokens: int,
) -> None:
    bench = Bench(token_budget=5)
    work = job("a", 12, max_tokens=max_tokens, prompt_logprobs=2, logprobs=1)
    bench.start(work)
    assert messages(bench.handle(done(bench.plan()))) == []
    assert messages(bench.handle(done(bench.plan()))) == []
    report, prompt, tokens = messages(bench.handle(done(bench.plan())))
    assert isinstance(report, PrefillReport)
    assert (report.num_cached, report.num_computed) == (0, 12)
    assert prompt == PromptLogprobs(work.key, tuple(told(token, 2) for token in range(1001, 1012)))
    assert isinstance(tokens, StepTokens)
    assert tokens.tokens[0].logprobs == told(50, 1)
    again = job("b", 12, max_tokens=1, prompt_logprobs=0)
    bench.start(again)
    plans = [bench.plan().batch.slices[0].start]
    assert plans == [0], "what the cache holds is computed again"


def test_a_job_that_cannot_go_on_is_refused_once_nothing_is_written_for_it(bench: Bench) -> None:
    failed, parked, other = (
        job("failed", 6, grammar=GRAMMAR),
        job("parked", 6, first=100, grammar=GRAMMAR),
        job("other", 6, first=200, max_tokens=1),
    )
    for work in (failed, parked, other):
        bench.start(work)
    bench.grant(failed)
    commands = bench.handle(done(bench.plan(), failed=(failed.key, parked.key)))
    assert StopPush(9, "decode-0") in commands
    _, tokens, dropped = messages(commands)
    assert isinstance(tokens, StepTokens)
    assert [token.key for token in tokens.tokens] == [other.key]
    assert dropped == Dropped(parked.key, "refused", "no token fits its grammar")
    assert bench.num_held == 2
    assert messages(bench.handle(PushStopped(9))) == [
        Dropped(failed.key, "refused", "no token fits its grammar")
    ]


def test_what_sampling_looks_back_with_is_not_kept_until_the_hand_off(bench: Bench) -> None:
    work = job("a", 6, grammar=GRAMMAR)
    bench.start(work)
    plan = bench.plan()
    assert plan.batch.slices[0].look_back is not None
    bench.handle(done(plan))
    assert bench.core._outbox[work.key].prompt.look_back is None
    assert messages(bench.tell(Cancel(work.key))) == [Dropped(work.key, "cancelled")]


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers(bench: Bench) -> None:
    (dropped,) = messages(bench.tell(Prefill(job("a", 81), "decode-0")))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "refused"
    assert "21" in dropped.detail
    assert "20" in dropped.detail


def test_ungranted_prompts_are_not_started_beyond_the_bound_and_granted_ones_are() -> None:
    bench = Bench(num_blocks=20, max_parked_blocks=4)
    for number, name in enumerate(("a", "b", "c")):
        bench.start(job(name, 8, first=100 * number))
    plan = bench.plan()
    assert names(plan) == ["a", "b"]
    bench.handle(done(plan))
    assert bench.core.next_step(0.0) is None
    bench.grant(job("c", 8, first=200))
    assert names(bench.plan()) == ["c"]


def test_an_answer_of_one_token_is_computed_whatever_is_parked() -> None:
    bench = Bench(num_blocks=20, max_parked_blocks=2)
    bench.start(job("parked", 8))
    bench.handle(done(bench.plan()))
    bench.start(job("more", 8, first=100))
    bench.start(job("one", 8, max_tokens=1, first=200))
    plan = bench.plan()
    assert names(plan) == ["one"]
    bench.handle(done(plan))
    assert bench.num_held == 2


def test_a_granted_prompt_gets_its_blocks_from_the_youngest_parked_one() -> None:
    bench = Bench(num_blocks=6, max_parked_blocks=6)
    old, young, granted = job("old", 8), job("young", 8, first=100), job("granted", 16, first=200)
    for bench.now, work in ((0.0, old), (0.1, young)):
        bench.start(work)
    bench.handle(done(bench.plan()))
    bench.start(granted)
    assert bench.core.next_step(0.2) is None
    bench.grant(granted)
    assert names(bench.plan()) == ["granted"]
    (dropped,) = messages(bench.handle(Tick()))
    assert isinstance(dropped, Dropped)
    assert (dropped.key, dropped.reason) == (young.key, "preempted")
    assert bench.num_held == 6


def test_grants_are_renewed_until_the_seal_even_while_the_prompt_waits() -> None:
    bench = Bench(transfer_timeout_s=10.0)
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    renewals = 0
    for tick in range(1, 101):
        bench.now = tick / 10
        sent = messages(bench.handle(Tick()))
        renewals += sent == [Renew((9,))]
    assert renewals == 4
    bench.handle(done(bench.plan()))
    bench.handle(PushFinished(9, (1, 2), 1, 0.1))
    bench.now = 20.0
    assert bench.handle(Tick()) == []


def test_a_second_request_with_the_same_prompt_computes_only_its_last_block(bench: Bench) -> None:
    for name, computed in (("first", 8), ("second", 4)):
        work = job(name, 8)
        bench.start(work)
        report = messages(bench.handle(done(bench.plan())))[0]
        assert isinstance(report, PrefillReport)
        assert (report.num_computed, report.num_cached) == (computed, 8 - computed)
        bench.tell(Cancel(work.key))


def test_an_unknown_key_is_answered_for_every_attempt(bench: Bench) -> None:
    key = RequestKey("never-seen", 3)
    assert messages(bench.tell(Cancel(key))) == [Dropped(key, "cancelled")]
