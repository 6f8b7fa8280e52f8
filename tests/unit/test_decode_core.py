"""The decode worker's decisions, step by step; every story ends with everything free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.decode_bench import PREFILL, Bench, manifest_of
from support.jobs import EOS, done, job, messages, names, told

from twinpool.engine.batch import SequenceSlice, StepBatch, StepOutput
from twinpool.errors import InvariantViolation
from twinpool.messages import (
    Cancel,
    Dropped,
    Granted,
    HandoffReport,
    Manifest,
    Reserve,
    Revoke,
    RevokeAck,
    Seal,
    SealAck,
    StepTokens,
)
from twinpool.metrics import WorkerMetric
from twinpool.request import FinishReason
from twinpool.worker.core import (
    PostReceive,
    ReceiveCancelled,
    StepDone,
    StepPlan,
    Tick,
    Verified,
    Verify,
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(headroom_tokens=4, transfer_timeout_s=10.0)
    yield bench
    bench.assert_empty()


def test_life_of_a_sequence(bench: Bench) -> None:
    # 1. room for prompt and headroom; only the prompt's blocks are lent
    work = job("a", 10, max_tokens=3)
    receive, sent = bench.tell(Reserve(work, *PREFILL))
    (granted,) = messages([sent])
    assert isinstance(granted, Granted)
    assert receive == PostReceive(granted.fence, *PREFILL, granted.block_ids)
    assert (len(granted.block_ids), granted.num_cached_blocks) == (3, 0)
    # 2. sealed: the bytes are looked at, with a bound
    assert bench.seal(work, granted) == [Verify(manifest_of(work, granted), 10.25)]
    assert bench.core.next_step(0.0) is None
    # 3. verified: prefill may let go, the coordinator knows who owns the request
    ack, report = messages(bench.handle(Verified(granted.fence, 0.5)))
    assert ack == SealAck(work.key, granted.fence)
    assert report == HandoffReport(work.key, "memory", 300, 0.25, 0.5, 3, 0)
    # 4. prefill's token is fed at the prompt's end, and the answer goes on with the second
    plan = bench.plan()
    (chunk,) = plan.batch.slices
    assert (list(chunk.token_ids), chunk.start) == ([50], 10)
    assert chunk.block_table[:3] == granted.block_ids
    (tokens,) = messages(bench.handle(done(plan)))
    assert isinstance(tokens, StepTokens)
    assert [(t.index, t.finish) for t in tokens.tokens] == [(1, None)]
    # 5. the last token ends it
    (tokens,) = messages(bench.handle(done(bench.plan())))
    assert isinstance(tokens, StepTokens)
    assert [(t.index, t.finish) for t in tokens.tokens] == [(2, FinishReason.LENGTH)]


def test_a_sequence_joins_the_batch_at_the_next_token_boundary(bench: Bench) -> None:
    bench.join(job("a", 4))
    plan = bench.plan()
    bench.join(job("b", 4, first=100))
    bench.handle(done(plan))
    plan = bench.plan()
    assert names(plan) == ["a", "b"]
    bench.handle(done(plan, EOS))


def test_nothing_is_admitted_without_room_for_its_headroom() -> None:
    bench = Bench(num_blocks=3, headroom_tokens=4)
    bench.join(job("a", 4, max_tokens=8))
    assert bench.tell(Reserve(job("b", 4, max_tokens=8, first=100), *PREFILL)) == []
    assert bench.core.stats().waiting == 1
    bench.handle(done(bench.plan(), EOS))
    assert bench.core.stats().waiting == 0


def test_reservations_wait_in_order_and_the_wait_is_reported() -> None:
    bench = Bench(num_blocks=4, headroom_tokens=0)
    bench.join(job("a", 12, max_tokens=3))
    for name, first in (("big", 100), ("small", 200)):
        assert bench.tell(Reserve(job(name, 12 if name == "big" else 3, 2, first=first), *PREFILL)) == []
    bench.now = 1.5
    _, *granted = messages(bench.handle(done(bench.plan(), EOS)))
    assert [(g.key.request_id, g.wait_s) for g in granted if isinstance(g, Granted)] == [
        ("big", 1.5),
        ("small", 1.5),
    ]


def test_no_more_sequences_are_granted_than_there_are_slots() -> None:
    bench = Bench(max_num_seqs=2)
    bench.reserve(job("a", 3))
    bench.reserve(job("b", 3, first=100))
    assert bench.tell(Reserve(job("c", 3, first=200), *PREFILL)) == []
    cancelled = messages(bench.tell(Cancel(job("a", 3).key)))
    assert [m.key.request_id for m in cancelled if isinstance(m, Granted)] == ["c"]


def test_the_line_of_waiting_reservations_is_bounded() -> None:
    bench = Bench(max_num_seqs=1)
    bench.reserve(job("a", 3))
    for number in range(4):
        assert bench.tell(Reserve(job(f"waits-{number}", 3), *PREFILL)) == []
    (dropped,) = messages(bench.tell(Reserve(job("too-many", 3), *PREFILL)))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "no_room"


def test_a_job_that_outgrows_the_pool_is_refused_with_both_numbers(bench: Bench) -> None:
    (dropped,) = messages(bench.tell(Reserve(job("a", 60, max_tokens=22), *PREFILL)))
    assert dropped == Dropped(
        job("a", 1).key, "refused", "prompt and output may need 21 KV blocks, the pool has 20"
    )


def test_only_blocks_that_are_not_cached_are_asked_for(bench: Bench) -> None:
    bench.join(job("a", 8))
    bench.handle(done(bench.plan(), EOS))
    longer = job("b", 14)
    receive, sent = bench.tell(Reserve(longer, *PREFILL))
    (granted,) = messages([sent])
    assert isinstance(granted, Granted)
    assert granted.num_cached_blocks == 2
    assert receive == PostReceive(granted.fence, *PREFILL, granted.block_ids[2:])
    bench.seal(longer, granted)
    report = messages(bench.handle(Verified(granted.fence, 0.0)))[1]
    assert isinstance(report, HandoffReport)
    assert (report.num_blocks_sent, report.num_blocks_cached) == (2, 2)
    bench.handle(done(bench.plan(), EOS))


def test_a_prompt_that_is_all_cached_joins_at_its_seal(bench: Bench) -> None:
    bench.join(job("a", 8))
    bench.handle(done(bench.plan(), EOS))
    again = job("b", 8)
    granted = bench.reserve(again)
    assert granted.num_cached_blocks == len(granted.block_ids) == 2
    ack, report = messages(bench.seal(again, granted))
    assert isinstance(ack, SealAck)
    assert isinstance(report, HandoffReport)
    plan = bench.plan()
    assert names(plan) == ["b"]
    bench.handle(done(plan, EOS))


def test_a_seal_that_comes_again_after_its_answer_was_lost_is_answered_again(bench: Bench) -> None:
    work = job("a", 8)
    granted = bench.join(work)
    assert messages(bench.seal(work, granted)) == [SealAck(work.key, granted.fence)]
    bench.tell(Cancel(work.key))


def test_a_writer_that_does_not_acknowledge_is_reminded_once_per_lease(bench: Bench) -> None:
    work = job("a", 8)
    granted = bench.reserve(work)
    bench.tell(Cancel(work.key))
    bench.handle(ReceiveCancelled(granted.fence))
    assert bench.handle(Tick()) == []
    for _ in range(2):
        bench.now += 10.0
        assert messages(bench.handle(Tick())) == [Revoke(work.key, granted.fence)]
        assert bench.handle(Tick()) == []
    assert bench.core.stats().quarantined_blocks == 2
    bench.hear(RevokeAck(work.key, granted.fence))


def test_corrupt_kv_is_refused_and_never_decoded(bench: Bench) -> None:
    work = job("a", 8)
    granted = bench.reserve(work)
    bench.seal(work, granted)
    commands = bench.handle(Verified(granted.fence, 0.0, "block 3 differs", num_mismatched=1))
    assert bench.core.counters[WorkerMetric.DIGEST_MISMATCHES] == 1
    assert bench.core.stats().quarantined_blocks == 2
    assert bench.core.next_step(0.0) is None
    ack, revoke, dropped = bench.revoked(granted.fence, commands)
    assert ack == SealAck(work.key, granted.fence, "block 3 differs")
    assert revoke == Revoke(work.key, granted.fence)
    assert dropped == Dropped(work.key, "transfer", "block 3 differs")
    assert bench.reserve(work).num_cached_blocks == 0
    bench.revoked(granted.fence + 1, bench.tell(Cancel(work.key)))


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"num_tokens": 7}, {"block_ids": (1,)}])
def test_a_manifest_that_is_not_what_was_granted_is_refused(bench: Bench, change: dict[str, object]) -> None:
    work = job("a", 8)
    granted = bench.reserve(work)
    fields = {name: getattr(manifest_of(work, granted), name) for name in Manifest.__struct_fields__}
    commands = bench.hear(Seal(Manifest(**{**fields, **change})))
    ack, *_, dropped = bench.revoked(granted.fence, commands)
    assert isinstance(ack, SealAck)
    assert ack.error
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "transfer"


def test_each_token_has_its_log_probabilities_if_they_are_asked_for(bench: Bench) -> None:
    bench.join(job("a", 4, max_tokens=3, logprobs=2))
    bench.join(job("b", 4, max_tokens=3, first=100))
    for _ in range(2):
        (tokens,) = messages(bench.handle(done(bench.plan())))
        assert isinstance(tokens, StepTokens)
        assert [token.logprobs for token in tokens.tokens] == [told(50, 2), None]


def test_prompt_tokens_that_a_decode_worker_would_compute_are_counted() -> None:
    bench = Bench()
    work = job("a", 8)
    bench.join(work)
    plan = bench.plan()
    bench.handle(done(plan))
    assert bench.core.counters[WorkerMetric.DECODE_POOL_PROMPT_TOKENS] == 0
    (chunk,) = bench.plan().batch.slices
    wrong = SequenceSlice(work.key, work.token_ids[:5], 0, chunk.block_table, work.sampling)
    bench.handle(StepDone(StepPlan(StepBatch((wrong,))), StepOutput({work.key: 50}, 0.01)))
    assert bench.core.counters[WorkerMetric.DECODE_POOL_PROMPT_TOKENS] == 5


def test_prompt_tokens_on_decode_are_an_error_in_strict_mode() -> None:
    bench = Bench(strict=True)
    work = job("a", 8)
    bench.join(work)
    (chunk,) = bench.plan().batch.slices
    wrong = SequenceSlice(work.key, work.token_ids[:5], 0, chunk.block_table, work.sampling)
    with pytest.raises(InvariantViolation, match="--strict: this decode worker computed 5 prompt tokens"):
        bench.handle(StepDone(StepPlan(StepBatch((wrong,))), StepOutput({work.key: 50}, 0.01)))
