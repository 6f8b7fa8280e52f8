"""The decode worker's decisions, step by step; every story ends with everything free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.jobs import EOS, GRAMMAR, done, job, messages, names, told

from twinpool.config import SchedulerConfig
from twinpool.decode_pool.core import DecodeCore
from twinpool.engine.batch import SequenceSlice, StepBatch, StepOutput
from twinpool.errors import InvariantViolation
from twinpool.layout import Dtype, KVLayout
from twinpool.messages import (
    Cancel,
    Dropped,
    Granted,
    HandoffReport,
    Manifest,
    Message,
    Renew,
    Reserve,
    Revoke,
    RevokeAck,
    Seal,
    SealAck,
    StepTokens,
)
from twinpool.metrics import WorkerMetric
from twinpool.request import FinishReason, Job
from twinpool.worker.core import (
    CancelReceive,
    Command,
    FromCoordinator,
    FromPeer,
    LinkLost,
    PeerGone,
    PeerLinked,
    PostReceive,
    ReceiveCancelled,
    StepDone,
    StepPlan,
    Tick,
    Verified,
    Verify,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype=Dtype.FLOAT32)
PREFILL = ("prefill-0", "life-1")


class Bench:
    """A decode core with one linked prefill worker."""

    def __init__(self, num_blocks: int = 20, strict: bool = False, **settings: float) -> None:
        self.num_blocks = num_blocks
        config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        self.core = DecodeCore(num_blocks, LAYOUT, "model", config, "life-1", strict)
        self.now = 0.0
        self.handle(PeerLinked(*PREFILL, "memory"))

    def handle(self, event: object) -> list[Command]:
        commands = self.core.handle(event, self.now)  # type: ignore[arg-type]
        self.core.check()
        return commands

    def tell(self, message: Message) -> list[Command]:
        return self.handle(FromCoordinator(message))

    def hear(self, message: Message) -> list[Command]:
        return self.handle(FromPeer(*PREFILL, message))

    def reserve(self, work: Job) -> Granted:
        """Reserves room that is there."""
        (granted,) = messages(self.tell(Reserve(work, *PREFILL)))
        assert isinstance(granted, Granted)
        return granted

    def seal(self, work: Job, granted: Granted, first_token: int = 50) -> list[Command]:
        return self.hear(Seal(manifest_of(work, granted, first_token)))

    def join(self, work: Job) -> Granted:
        """Everything from Reserve to the place in the batch."""
        granted = self.reserve(work)
        self.seal(work, granted)
        self.handle(Verified(granted.fence, 0.0))
        return granted

    def revoked(self, fence: int, commands: list[Command]) -> list[object]:
        """Answers a revocation from both sides; returns the messages that went out before."""
        assert CancelReceive(fence) in commands
        self.handle(ReceiveCancelled(fence))
        key = next(m.key for m in messages(commands) if isinstance(m, Revoke))
        self.hear(RevokeAck(key, fence))
        return messages(commands)

    def plan(self) -> StepPlan:
        plan = self.core.next_step(self.now)
        self.core.check()
        assert plan is not None
        return plan


def manifest_of(work: Job, granted: Granted, first_token: int = 50) -> Manifest:
    sent = granted.block_ids[granted.num_cached_blocks :]
    return Manifest(
        key=work.key,
        fence=granted.fence,
        fingerprint="model",
        layout=LAYOUT,
        num_tokens=len(work.token_ids),
        block_ids=sent,
        digests=tuple(range(len(sent))),
        first_token=first_token,
        num_bytes=100 * len(sent),
        transfer_s=0.25,
    )


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(headroom_tokens=4, transfer_timeout_s=10.0)
    yield bench
    stats = bench.core.stats()
    assert stats.free_blocks + stats.cached_blocks == bench.num_blocks
    assert stats.waiting == stats.running == stats.leased_blocks == stats.quarantined_blocks == 0
    assert bench.core.next_step(bench.now) is None


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


def test_cancel_is_answered_at_once_and_its_blocks_wait_for_the_writer(bench: Bench) -> None:
    work = job("a", 8)
    granted = bench.reserve(work)
    commands = bench.tell(Cancel(work.key))
    assert messages(commands) == [Revoke(work.key, granted.fence), Dropped(work.key, "cancelled")]
    stats = bench.core.stats()
    assert (stats.quarantined_blocks, stats.owned_blocks) == (2, 0)
    bench.handle(ReceiveCancelled(granted.fence))
    assert bench.core.stats().quarantined_blocks == 2
    bench.hear(RevokeAck(work.key, granted.fence))
    assert bench.core.stats().free_blocks == 20


def test_a_seal_or_verification_after_the_cancel_changes_nothing(bench: Bench) -> None:
    work = job("a", 8)
    granted = bench.reserve(work)
    bench.seal(work, granted)
    bench.revoked(granted.fence, bench.tell(Cancel(work.key)))
    assert messages(bench.seal(work, granted)) == [
        SealAck(work.key, granted.fence)
    ]  # so that prefill lets go
    assert bench.handle(Verified(granted.fence, 0.0)) == []
    assert bench.core.next_step(0.0) is None


def test_cancel_of_a_running_sequence_takes_effect_after_its_step(bench: Bench) -> None:
    work = job("a", 8)
    bench.join(work)
    plan = bench.plan()
    assert bench.tell(Cancel(work.key)) == []
    assert bench.core.stats().owned_blocks == 3
    assert messages(bench.handle(done(plan))) == [Dropped(work.key, "cancelled")]


def test_cancel_between_steps_of_a_waiting_and_of_an_unknown_one(bench: Bench) -> None:
    running = job("a", 8)
    bench.join(running)
    for key in (running.key, job("unknown", 1).key):
        assert messages(bench.tell(Cancel(key))) == [Dropped(key, "cancelled")]


def test_a_grant_whose_writer_is_silent_expires_and_one_that_is_renewed_does_not(bench: Bench) -> None:
    silent, renewed = job("silent", 4), job("renewed", 4, first=100)
    lost, kept = bench.reserve(silent), bench.reserve(renewed)
    for bench.now in (4.0, 8.0):
        bench.hear(Renew((kept.fence,)))
    bench.now = 10.0
    commands = bench.handle(Tick())
    dropped = [m for m in messages(commands) if isinstance(m, Dropped)]
    assert [(m.key, m.reason) for m in dropped] == [(silent.key, "deadline")]
    bench.revoked(lost.fence, commands)
    bench.now = 18.1
    bench.revoked(kept.fence, bench.handle(Tick()))


def test_a_dead_writer_that_nobody_reports_loses_its_grant_and_frees_it_when_known_dead(bench: Bench) -> None:
    granted = bench.reserve(job("a", 8))
    bench.now = 10.0
    bench.handle(Tick())
    bench.handle(ReceiveCancelled(granted.fence))
    assert bench.core.stats().quarantined_blocks == 2
    bench.handle(PeerGone(*PREFILL))
    assert bench.core.stats().quarantined_blocks == 0


def test_a_lease_does_not_run_out_while_bytes_are_verified(bench: Bench) -> None:
    work = job("a", 8)
    granted = bench.reserve(work)
    bench.seal(work, granted)
    bench.now = 50.0
    assert bench.handle(Tick()) == []
    bench.handle(Verified(granted.fence, 0.0))
    bench.handle(done(bench.plan(), EOS))


def test_a_dead_prefill_worker_costs_what_it_had_not_sealed(bench: Bench) -> None:
    open_one, sealed, running = job("open", 4), job("sealed", 4, first=100), job("running", 4, first=200)
    bench.join(running)
    sealed_grant = bench.reserve(sealed)
    bench.seal(sealed, sealed_grant)
    open_grant = bench.reserve(open_one)
    commands = bench.handle(PeerGone(*PREFILL))
    assert [m.key for m in messages(commands) if isinstance(m, Dropped)] == [open_one.key]
    bench.handle(ReceiveCancelled(open_grant.fence))
    assert bench.core.stats().quarantined_blocks == 0
    bench.handle(Verified(sealed_grant.fence, 0.0))
    plan = bench.plan()
    assert names(plan) == ["running", "sealed"]
    bench.handle(done(plan, EOS))
    (dropped,) = messages(bench.tell(Reserve(open_one, *PREFILL)))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "transfer"


def test_each_token_has_its_log_probabilities_if_they_are_asked_for(bench: Bench) -> None:
    bench.join(job("a", 4, max_tokens=3, logprobs=2))
    bench.join(job("b", 4, max_tokens=3, first=100))
    for _ in range(2):
        (tokens,) = messages(bench.handle(done(bench.plan())))
        assert isinstance(tokens, StepTokens)
        assert [token.logprobs for token in tokens.tokens] == [told(50, 2), None]


def test_a_sequence_that_cannot_go_on_is_refused_and_the_step_that_follows_is_without_it(
    bench: Bench,
) -> None:
    failed, other = job("a", 4, max_tokens=9, grammar=GRAMMAR), job("b", 4, max_tokens=3, first=100)
    bench.join(failed)
    bench.join(other)
    plan = bench.plan()
    ahead = bench.core.plan_ahead()
    assert ahead is not None
    ended = done(plan, failed=(failed.key,))
    following = ahead.resolve(plan, ended.output)
    assert names(following) == ["b"]
    dropped, tokens = messages(bench.handle(StepDone(plan, ended.output, following)))
    assert dropped == Dropped(failed.key, "refused", "no token fits its grammar")
    assert isinstance(tokens, StepTokens)
    assert [token.key for token in tokens.tokens] == [other.key]
    assert bench.core.counters[WorkerMetric.OUTPUT_TOKENS] == 1
    assert bench.core.counters[WorkerMetric.REFUSED] == 1
    assert following is not None
    bench.handle(done(following))


def test_the_youngest_gives_way_and_says_so() -> None:
    bench = Bench(num_blocks=3, headroom_tokens=0)
    old, young = job("old", 4), job("young", 4, first=100)
    bench.join(old)
    bench.join(young)
    assert names(bench.plan()) == ["old"]
    dropped = messages(bench.handle(Tick()))
    assert [(m.key, m.reason) for m in dropped if isinstance(m, Dropped)] == [(young.key, "preempted")]


def test_the_last_sequence_takes_a_grant_back_rather_than_stand_still() -> None:
    bench = Bench(num_blocks=4, headroom_tokens=0)
    running, promised = job("running", 8), job("promised", 8, first=100)
    bench.join(running)
    granted = bench.reserve(promised)
    assert bench.core.next_step(0.0) is None
    assert bench.core.next_step(0.0) is None
    commands = bench.handle(Tick())
    assert [m.key for m in messages(commands) if isinstance(m, Dropped)] == [promised.key]
    bench.revoked(granted.fence, commands)
    assert names(bench.plan()) == ["running"]


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


def test_blocks_of_a_lost_writer_that_is_not_known_to_be_dead_stay_out_of_use_until_it_is(
    bench: Bench,
) -> None:
    work = job("a", 8)
    granted = bench.reserve(work)
    commands = bench.handle(LinkLost(*PREFILL))
    assert [(m.key, m.reason) for m in messages(commands) if isinstance(m, Dropped)] == [
        (work.key, "transfer")
    ]
    bench.handle(ReceiveCancelled(granted.fence))
    for _ in range(10):  # time alone frees nothing
        bench.now += 10.0
        bench.handle(Tick())
    assert bench.core.stats().quarantined_blocks == 2
    late = messages(bench.tell(Reserve(job("b", 8), *PREFILL)))
    assert [type(message) for message in late] == [Dropped]
    bench.handle(PeerGone(*PREFILL))
    assert bench.core.stats().quarantined_blocks == 0


def test_who_waits_too_long_for_room_is_sent_back_to_be_started_elsewhere() -> None:
    bench = Bench(num_blocks=3, headroom_tokens=0, grant_timeout_s=30.0)
    bench.join(job("running", 8, max_tokens=2))
    waiting = job("waiting", 8, max_tokens=2, first=100)
    assert bench.tell(Reserve(waiting, *PREFILL)) == []
    bench.now = 29.9
    assert bench.handle(Tick()) == []
    bench.now = 30.0
    (dropped,) = messages(bench.handle(Tick()))
    assert isinstance(dropped, Dropped)
    assert (dropped.key, dropped.reason) == (waiting.key, "no_room")
    assert bench.core.counters[WorkerMetric.NO_ROOM] == 1
    assert bench.core.counters[WorkerMetric.PREEMPTIONS] == 0
    assert bench.core.stats().waiting == 0
    bench.handle(done(bench.plan(), EOS))


def test_blocks_of_a_writer_that_cannot_write_late_are_back_without_its_word() -> None:
    bench = Bench()
    bench.handle(PeerLinked(*PREFILL, "tcp"))
    work = job("a", 8)
    granted = bench.reserve(work)
    commands = bench.tell(Cancel(work.key))
    assert Revoke(work.key, granted.fence) in messages(commands)  # it must stop all the same
    assert bench.core.stats().quarantined_blocks == 2
    bench.handle(ReceiveCancelled(granted.fence))
    assert bench.core.stats().free_blocks == bench.num_blocks
    bench.hear(RevokeAck(work.key, granted.fence))
    assert bench.core.counters[WorkerMetric.STALE_FENCES] == 0
