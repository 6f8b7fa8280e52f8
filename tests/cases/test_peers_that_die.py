"""Peers that die or freeze: others hear of it, go on, and hold nothing for them. Ids as in `README.md`."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.coordinator_core import CoreDriver
from support.fleet import assert_canary, frozen, frozen_in_transfer, num_live
from support.server import Server, wait_for
from support.visitors import Visit, ask, stream

from twinpool.messages import Cancel
from twinpool.request import FinishReason, RequestKey

STALL_LIMIT_S = 2.5
"""No stream may stand still for so long because of another's trouble, on a busy machine either."""
LONG = {"prompt": list(range(10, 300)) * 2, "max_tokens": 60, "ignore_eos": True}


def test_a_sender_frozen_in_mid_transfer_holds_decodes_blocks_and_its_step_loop(
    split: Server, visit: Visit
) -> None:
    """P5, M4: the prefill worker is stopped while its blocks travel. Decode goes on with its other streams, takes the
    reservation back by its own clock, and the request's tokens are right, from the other prefill worker."""
    fields = {"prompt": list(range(20, 280)), "max_tokens": 20, "ignore_eos": True}
    wanted = ask(split, cache_salt="wanted", **fields)
    expired = split.metric("twinpool_reservations_expired_total")
    bystander = visit(split, prompt="By the way", max_tokens=400, ignore_eos=True)
    bystander.wait_until("decoding")
    with frozen_in_transfer(split, visit, **fields) as victim:
        while bystander.read_some(STALL_LIMIT_S):
            pass
        assert victim.read_all().token_ids == wanted.token_ids
    assert bystander.states()[-1] == "completed"
    wait_for(
        "decode took the reservation back by itself",
        lambda: split.metric("twinpool_reservations_expired_total") > expired,
    )


def test_a_peer_that_takes_nothing_stalls_the_whole_prefill_worker(split: Server, visit: Visit) -> None:
    """P6, M15: the decode worker is stopped while blocks travel to it and more wait for it. Prefill still answers what
    needs no decode worker; and once decode moves again, so does everything that was parked."""
    waiting = [visit(split, cache_salt=f"parked {n}", **LONG) for n in range(3)]
    waiting[0].wait_until("transferring")
    with frozen(split, "decode-0"), ThreadPoolExecutor(2) as pool:
        short = list(pool.map(lambda n: ask(split, prompt=f"One token, {n}", max_tokens=1), range(4)))
        assert [answer.finish for answer in short] == ["length"] * 4
    answers = [visitor.read_all() for visitor in waiting]
    assert {answer.finish for answer in answers} == {"length"}
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


def test_requests_without_workers_hang_or_are_told_to_try_later(colocated: Server) -> None:
    """P8, M9: the last worker is gone, as before the first one came: 503 with the reason, `/ready` says no, and so
    does `/health` while somebody waits. A stream that was running is carried on when a worker is back."""
    fields = {"prompt": "I will be back", "max_tokens": 900, "ignore_eos": True}
    wanted = stream(colocated, **fields)
    with ThreadPoolExecutor(1) as pool:
        delivered = colocated.metric("twinpool_delivered_tokens_total")
        running = pool.submit(stream, colocated, **fields)
        wait_for("it runs", lambda: colocated.metric("twinpool_delivered_tokens_total") > delivered + 20)
        os.kill(colocated.worker_pids()["colocated-0"], signal.SIGKILL)
        wait_for("nobody is ready", lambda: colocated.get("/ready").status_code == 503)
        assert colocated.get("/ready").json()["ready"] is False
        assert colocated.get("/health").status_code == 503
        refused = ask(colocated, prompt="Anybody here?")
        assert refused.status == 503
        assert "no worker" in refused.error
        assert running.result().outcome == wanted.outcome
    wait_for("it is ready again", lambda: colocated.get("/ready").status_code == 200, 30)
    assert colocated.get("/health").status_code == 200
    assert_canary(colocated)
    assert num_live(colocated) == 0


# ── the coordinator's core ──────────────────────────────────────────────────────────────────────────────────

ENDINGS = ("refused", "transfer", "deadline", "lost", "preempted", "no_room")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("leg", ["P", "D"])
@pytest.mark.parametrize("has_token", [False, True])
def test_one_leg_ends_and_the_other_stays_pinned(leg: str, ending: str, has_token: bool) -> None:
    """P2, P1, M2, C3: whichever leg says no, gives up or dies, before or after the first token, the other one is told
    in the same instant; the client gets its error, or another attempt; and what both say later counts once."""
    driver = CoreDriver(max_attempts=2)
    driver.pair()
    driver.submit()
    driver.grant()
    if has_token:
        driver.report()
        driver.token("P", 0)
    other = "D" if leg == "P" else "P"
    driver.sent.clear()
    if ending == "lost":
        driver.lose(leg)
    else:
        driver.dropped(leg, ending)
    if leg == "P" and ending == "lost" and has_token:
        driver.dropped("D", "transfer")  # decode may have had all of it, so it is decode's word that counts
    else:
        assert Cancel(RequestKey("r", 1)) in driver.sent_to(other)
    if ending == "refused":
        assert driver.finish() is FinishReason.ERROR
    else:
        assert driver.finish() is None
    for worker_id in ("P", "D"):
        driver.dropped(worker_id, "cancelled")
    driver.abandon()
    driver.answer_cancels()
    driver.assert_empty()
