"""How sequences end early on a decode worker: cancelled, expired, their writer lost, or no room; all is free then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.decode_bench import PREFILL, Bench
from support.jobs import EOS, GRAMMAR, done, job, messages, names

from twinpool.messages import (
    Cancel,
    Dropped,
    Renew,
    Reserve,
    Revoke,
    RevokeAck,
    SealAck,
    StepTokens,
)
from twinpool.metrics import WorkerMetric
from twinpool.worker.core import (
    LinkLost,
    PeerGone,
    PeerLinked,
    ReceiveCancelled,
    StepDone,
    Tick,
    Verified,
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(headroom_tokens=4, transfer_timeout_s=10.0)
    yield bench
    bench.assert_empty()


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
    assert bench.core.stats().free_blocks == bench.core.pool.num_blocks
    bench.hear(RevokeAck(work.key, granted.fence))
    assert bench.core.counters[WorkerMetric.STALE_FENCES] == 0
