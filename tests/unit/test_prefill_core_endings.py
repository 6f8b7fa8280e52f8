"""How jobs end early on a prefill worker: cancelled, revoked, a peer or its link lost; all is free afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.jobs import done, job, messages
from support.prefill_bench import DECODE, Bench

from twinpool.config import SchedulerConfig
from twinpool.messages import (
    Cancel,
    Dropped,
    PushTo,
    Revoke,
    RevokeAck,
    SealAck,
)
from twinpool.prefill_pool.handoff import RENEWALS_PER_LEASE
from twinpool.worker.core import (
    FromPeer,
    LinkLost,
    PeerGone,
    PeerLinked,
    PushFailed,
    PushFinished,
    PushStopped,
    SendPeer,
    StopPush,
    Tick,
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.assert_empty()


def test_cancel_of_a_queued_job_and_of_an_unknown_one_is_answered_at_once(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    assert messages(bench.tell(Cancel(work.key))) == [Dropped(work.key, "cancelled")]
    assert messages(bench.tell(Cancel(work.key))) == [Dropped(work.key, "cancelled")]


def test_cancel_during_the_step_takes_effect_when_it_is_done(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    plan = bench.plan()
    assert bench.tell(Cancel(work.key)) == []
    assert bench.num_held == 2
    assert messages(bench.handle(done(plan))) == [Dropped(work.key, "cancelled")]


def test_cancel_during_a_step_that_pushes_stops_the_push_after_the_step(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    plan = bench.plan()
    assert bench.tell(Cancel(work.key)) == []
    assert bench.handle(done(plan)) == [StopPush(9, "decode-0")]
    assert bench.num_held == 2
    assert messages(bench.handle(PushStopped(9))) == [Dropped(work.key, "cancelled")]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_cancel_while_bytes_may_be_under_way_waits_for_the_transport(bench: Bench, is_sealed: bool) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    bench.handle(done(bench.plan()))
    if is_sealed:
        bench.handle(PushFinished(9, (1, 2), 1, 0.1))
    assert bench.tell(Cancel(work.key)) == [StopPush(9, "decode-0")]
    assert bench.handle(PushFinished(9, (1, 2), 1, 0.1)) == []  # it was on its way already
    assert bench.hear(SealAck(work.key, 9)) == []
    assert bench.num_held == 2
    assert messages(bench.handle(PushStopped(9))) == [Dropped(work.key, "cancelled")]


def test_cancel_of_a_parked_job_frees_it_at_once(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.handle(done(bench.plan()))
    assert messages(bench.tell(Cancel(work.key))) == [Dropped(work.key, "cancelled")]
    assert bench.grant(work) == []


def test_a_revoked_push_is_acknowledged_once_it_has_stopped(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    bench.handle(done(bench.plan()))
    assert bench.hear(Revoke(work.key, 9)) == [StopPush(9, "decode-0")]
    assert bench.hear(Revoke(work.key, 9)) == []
    ack = RevokeAck(work.key, 9)
    *acks, dropped = messages(bench.handle(PushStopped(9)))
    assert acks == [ack, ack]
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "revoked"


def test_a_revocation_that_overtakes_its_grant_makes_it_void(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    assert bench.hear(Revoke(work.key, 9)) == [SendPeer(*DECODE, RevokeAck(work.key, 9))]
    (dropped,) = messages(bench.grant(work))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "revoked"
    assert bench.num_held == 0


def test_another_life_of_the_decode_worker_cannot_revoke(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    stranger = ("decode-0", "life-2")
    ack = bench.handle(FromPeer(*stranger, Revoke(work.key, 9)))
    assert ack == [SendPeer(*stranger, RevokeAck(work.key, 9))]
    plan = bench.plan()
    assert len(plan.pushes) == 1
    bench.tell(Cancel(work.key))
    bench.handle(done(plan))
    bench.handle(PushStopped(9))


def test_a_decode_worker_that_dies_costs_its_transfers_and_no_others(bench: Bench) -> None:
    bench.handle(PeerLinked("decode-1", "life-1", "memory"))
    lost, kept = job("lost", 6), job("kept", 6, first=50)
    for work in (lost, kept):
        bench.start(work)
    bench.grant(lost)
    bench.tell(PushTo(kept.key, "decode-1", "life-1", 10, (7, 8), 0))
    bench.handle(done(bench.plan()))
    assert bench.handle(PeerGone(*DECODE)) == [StopPush(9, "decode-0")]
    (dropped,) = messages(bench.handle(PushStopped(9)))
    assert isinstance(dropped, Dropped)
    assert (dropped.key, dropped.reason) == (lost.key, "transfer")
    bench.handle(PushFinished(10, (1, 2), 1, 0.1))
    bench.handle(FromPeer("decode-1", "life-1", SealAck(kept.key, 10)))


def test_a_seal_that_is_not_answered_for_a_lease_is_sent_again(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    bench.handle(done(bench.plan()))
    (seal,) = messages(bench.handle(PushFinished(9, (1, 2), 1, 0.1)))
    sent = []
    for _ in range(2 * RENEWALS_PER_LEASE):
        bench.now += SchedulerConfig().transfer_timeout_s / RENEWALS_PER_LEASE
        sent.append(messages(bench.handle(Tick())))
    silence: list[list[object]] = [[]] * (RENEWALS_PER_LEASE - 1)
    assert sent == [*silence, [seal], *silence, [seal]]
    bench.hear(SealAck(work.key, 9))


def test_a_lost_link_costs_what_was_not_finished_and_refuses_grants_until_it_is_back(bench: Bench) -> None:
    sealed, pushing = job("sealed", 6), job("pushing", 6, first=50)
    for work, fence in ((sealed, 9), (pushing, 10)):
        bench.start(work)
        bench.grant(work, fence)
        bench.handle(done(bench.plan()))
    bench.handle(PushFinished(9, (1, 2), 1, 0.1))
    assert bench.handle(LinkLost(*DECODE)) == [StopPush(10, "decode-0")]
    (dropped,) = messages(bench.handle(PushStopped(10)))
    assert dropped == Dropped(pushing.key, "transfer", "the link to decode-0 is lost")

    early, late = job("early", 6, first=80), job("late", 6, first=90)
    bench.start(early)
    (dropped,) = messages(bench.grant(early, 11))
    assert isinstance(dropped, Dropped)
    assert dropped.detail == "no link to decode-0/life-1"
    bench.handle(PeerLinked(*DECODE, "memory"))
    bench.start(late)
    assert messages(bench.grant(late, 12)) == []
    bench.tell(Cancel(late.key))
    bench.handle(PushStopped(12))
    bench.handle(FromPeer(*DECODE, SealAck(sealed.key, 9)))


def test_a_grant_of_a_worker_that_is_gone_is_refused(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.handle(PeerGone(*DECODE))
    (dropped,) = messages(bench.grant(work))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "transfer"


def test_a_failed_push_drops_the_job_and_frees_its_blocks(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    bench.handle(done(bench.plan()))
    (dropped,) = messages(bench.handle(PushFailed(9, "cable cut")))
    assert dropped == Dropped(work.key, "transfer", "cable cut")


def test_kv_that_decode_refuses_is_stopped_before_its_blocks_come_back(bench: Bench) -> None:
    work = job("a", 6)
    bench.start(work)
    bench.grant(work)
    bench.handle(done(bench.plan()))
    bench.handle(PushFinished(9, (1, 2), 1, 0.1))
    assert bench.hear(SealAck(work.key, 9, "a digest differs")) == [StopPush(9, "decode-0")]
    assert bench.hear(Revoke(work.key, 9)) == []
    ack, dropped = messages(bench.handle(PushStopped(9)))
    assert ack == RevokeAck(work.key, 9)
    assert dropped == Dropped(work.key, "transfer", "a digest differs")
