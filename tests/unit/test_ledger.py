"""The ownership ledger: the ways a reservation ends, and what only a bug can cause."""

from __future__ import annotations

import subprocess
import sys

import pytest

from twinpool.errors import InvariantViolation
from twinpool.kv_transfer.ledger import OwnershipLedger, ReservationState, Writer
from twinpool.metrics import Counters, WorkerMetric
from twinpool.request import RequestKey

KEY = RequestKey("req-1", 0)
WRITER = Writer("prefill-0", "a1")
REBORN = Writer("prefill-0", "a2")


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def ledger(counters: Counters) -> OwnershipLedger:
    return OwnershipLedger("decode-0-first-life", counters)


def test_a_verified_reservation_hands_its_blocks_to_the_caller(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [4, 7], now=0.0, timeout_s=10.0)
    assert ledger.num_reserved == 2
    assert ledger.sealed(fence, WRITER, now=1.0)
    assert ledger.accept(fence) == (4, 7)
    assert (ledger.num_reserved, ledger.num_quarantined, ledger.reservation(fence)) == (0, 0, None)


def test_revoked_blocks_wait_for_both_sides_in_either_order(ledger: OwnershipLedger) -> None:
    first = ledger.open(KEY, WRITER, [1], now=0.0, timeout_s=10.0)
    second = ledger.open(KEY, WRITER, [2], now=0.0, timeout_s=10.0)
    assert ledger.revoke(first, 1.0, "cancelled")
    assert ledger.revoke(second, 1.0, "cancelled")
    assert ledger.receive_cancelled(first) == ()
    assert ledger.writer_acknowledged(second, WRITER) == ()
    assert ledger.num_quarantined == 2
    assert ledger.writer_acknowledged(first, WRITER) == (1,)
    assert ledger.receive_cancelled(second) == (2,)
    assert ledger.num_quarantined == 0


def test_a_dead_writer_needs_no_acknowledgement(ledger: OwnershipLedger) -> None:
    revoked = ledger.open(KEY, WRITER, [1], now=0.0, timeout_s=10.0)
    still_open = ledger.open(KEY, WRITER, [2], now=0.0, timeout_s=10.0)
    ledger.revoke(revoked, 1.0, "cancelled")
    ledger.receive_cancelled(revoked)
    orphans = ledger.writer_gone(WRITER)
    assert (orphans.released, orphans.fences) == ((1,), (still_open,))
    ledger.revoke(still_open, 2.0, "writer gone")
    assert ledger.receive_cancelled(still_open) == (2,)


def test_a_sealed_reservation_of_a_dead_writer_can_still_be_accepted(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [1], now=0.0, timeout_s=10.0)
    ledger.sealed(fence, WRITER, now=1.0)
    assert ledger.writer_gone(WRITER).fences == (fence,)
    assert ledger.accept(fence) == (1,)


def test_another_life_of_the_writer_can_neither_seal_nor_acknowledge(
    ledger: OwnershipLedger, counters: Counters
) -> None:
    fence = ledger.open(KEY, WRITER, [1], now=0.0, timeout_s=10.0)
    assert not ledger.sealed(fence, REBORN, now=1.0)
    assert ledger.writer_gone(REBORN).fences == ()
    ledger.revoke(fence, 1.0, "cancelled")
    ledger.receive_cancelled(fence)
    assert ledger.writer_acknowledged(fence, REBORN) == ()
    assert ledger.num_quarantined == 1
    assert counters[WorkerMetric.STALE_FENCES] == 2


def test_a_lease_runs_out_unless_it_is_renewed(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [1], now=100.0, timeout_s=5.0)
    assert ledger.expired(104.9) == ()
    assert ledger.expired(105.0) == (fence,)
    assert ledger.renew(fence, 104.0)
    assert ledger.expired(108.9) == ()
    assert ledger.sealed(fence, WRITER, now=108.0)
    assert ledger.expired(112.9) == ()
    assert ledger.expired(113.0) == (fence,)


def test_late_and_repeated_events_are_counted_and_change_nothing(
    ledger: OwnershipLedger, counters: Counters
) -> None:
    fence = ledger.open(KEY, WRITER, [1], now=0.0, timeout_s=10.0)
    ledger.sealed(fence, WRITER, now=1.0)
    assert not ledger.sealed(fence, WRITER, now=1.0)
    assert ledger.writer_acknowledged(fence, WRITER) == ()  # nobody had asked
    ledger.accept(fence)
    assert ledger.accept(fence) is None
    assert not ledger.revoke(fence, 2.0, "late")
    assert ledger.receive_cancelled(fence) == ()
    assert ledger.writer_acknowledged(fence, WRITER) == ()
    assert not ledger.renew(fence, 2.0)
    assert counters[WorkerMetric.STALE_FENCES] == 7
    ledger.check()


def test_a_verification_that_ends_after_the_revocation_gives_no_blocks(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [1], now=0.0, timeout_s=10.0)
    ledger.sealed(fence, WRITER, now=1.0)
    ledger.revoke(fence, 2.0, "cancelled")
    assert ledger.accept(fence) is None
    assert ledger.num_quarantined == 1


def test_fences_grow_and_a_restarted_process_does_not_reuse_them(ledger: OwnershipLedger) -> None:
    fences = [ledger.open(KEY, WRITER, [block], 0.0, 1.0) for block in range(50)]
    assert fences == sorted(set(fences))
    reborn = OwnershipLedger("decode-0-second-life", Counters())
    assert reborn.open(KEY, WRITER, [0], 0.0, 1.0) not in fences


def test_lending_a_block_twice_is_a_bug_told_with_its_story(ledger: OwnershipLedger) -> None:
    ledger.open(KEY, WRITER, [3], now=1.5, timeout_s=10.0)
    with pytest.raises(InvariantViolation, match=r"block 3 is lent already.*req-1#0.*open at 1\.500"):
        ledger.open(KEY, WRITER, [2, 3], now=2.0, timeout_s=10.0)
    with pytest.raises(InvariantViolation, match="twice"):
        ledger.open(KEY, WRITER, [5, 5], now=2.0, timeout_s=10.0)
    assert ledger.num_reserved == 1


def test_accepting_what_is_not_sealed_is_a_bug(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [3], now=0.0, timeout_s=10.0)
    with pytest.raises(InvariantViolation, match="accept is not allowed now"):
        ledger.accept(fence)


def test_cancelling_the_receive_of_a_live_reservation_is_a_bug(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [3], now=0.0, timeout_s=10.0)
    with pytest.raises(InvariantViolation, match="not revoked"):
        ledger.receive_cancelled(fence)


def test_a_fence_that_was_never_given_is_a_bug_here_and_noise_from_afar(ledger: OwnershipLedger) -> None:
    for local in (ledger.accept, ledger.receive_cancelled):
        with pytest.raises(InvariantViolation, match="never given"):
            local(1)
    assert not ledger.sealed(1, WRITER, now=0.0)
    assert ledger.writer_acknowledged(1, WRITER) == ()


def test_the_check_finds_a_block_that_lost_its_reservation(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [3], now=0.0, timeout_s=10.0)
    reservation = ledger.reservation(fence)
    assert reservation is not None
    reservation.block_ids = ()
    with pytest.raises(InvariantViolation):
        ledger.check()


def test_the_check_finds_an_ended_reservation_that_was_kept(ledger: OwnershipLedger) -> None:
    fence = ledger.open(KEY, WRITER, [3], now=0.0, timeout_s=10.0)
    reservation = ledger.reservation(fence)
    assert reservation is not None
    reservation.state = ReservationState.RELEASED
    with pytest.raises(InvariantViolation, match="ended"):
        ledger.check()


def test_the_ledger_brings_no_torch_along() -> None:
    code = "import sys, twinpool.kv_transfer.ledger; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0
    )
