"""Who may join, what a refusal says, and who hears of whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.coordinator_core import LAYOUT, CoreDriver, register, stats

from twinpool.config import Role
from twinpool.coordinator import registry
from twinpool.coordinator.events import FromWorker, Shutdown
from twinpool.layout import Dtype
from twinpool.messages import (
    PROTOCOL_VERSION,
    Denied,
    Heartbeat,
    Left,
    LinkFailed,
    LinkReady,
    PeerInfo,
    Peers,
    StartAnew,
    Stop,
    Welcome,
)
from twinpool.metrics import CoordinatorMetric


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver()
    driver.join("prefill-0", Role.PREFILL)
    driver.sent.clear()
    return driver


@pytest.mark.parametrize(
    ("changes", "mine", "theirs"),
    [
        ({"fingerprint": "model-2"}, "fingerprint model-2", "model-1"),
        (
            {"fingerprint": "model-1 with int8 weights"},
            "fingerprint model-1 with int8 weights",
            "has model-1;",
        ),
        ({"layout": replace(LAYOUT, dtype=Dtype.BFLOAT16)}, "dtype bfloat16", "float32"),
        ({"layout": replace(LAYOUT, block_size=32)}, "block size 32", "16"),
        ({"layout": replace(LAYOUT, num_kv_heads=4)}, "num_kv_heads=4", "num_kv_heads=1"),
        ({"max_model_len": 1024}, "max_model_len 1024", "512"),
        ({"protocol": 99}, "protocol 99", f"coordinator {PROTOCOL_VERSION}"),
    ],
)
def test_a_worker_that_does_not_match_is_denied_with_both_values(
    driver: CoreDriver, changes: dict[str, Any], mine: str, theirs: str
) -> None:
    driver.join("decode-0", Role.DECODE, **changes)
    (denied,) = driver.sent_to("decode-0")
    assert isinstance(denied, Denied)
    assert "decode-0" in denied.reason
    assert mine in denied.reason
    assert theirs in denied.reason.split(mine)[1]
    assert driver.core.registry.get("decode-0") is None
    assert driver.count(CoordinatorMetric.WORKERS_DENIED) == 1


def test_a_strict_server_denies_a_hybrid_and_takes_the_same_worker_when_it_is_none() -> None:
    driver = CoreDriver(strict=True)
    driver.join("decode-0", Role.DECODE, itl_budget_s=0.1)
    (denied,) = driver.sent_to("decode-0")
    assert isinstance(denied, Denied)
    assert "decode-0 is a hybrid (--hybrid, --itl-budget 100), this server is --strict" in denied.reason
    assert len(driver.core.registry) == 0
    driver.join("decode-0", Role.DECODE, "b")
    assert len(driver.core.registry) == 1


def test_the_terms_of_the_first_worker_outlive_it(driver: CoreDriver) -> None:
    driver.lose("prefill-0")
    driver.join("prefill-1", Role.PREFILL, fingerprint="model-2")
    (denied,) = driver.sent_to("prefill-1")
    assert isinstance(denied, Denied)


def test_split_and_colocated_workers_do_not_mix(driver: CoreDriver) -> None:
    driver.join("colocated-0", Role.COLOCATED)
    (denied,) = driver.sent_to("colocated-0")
    assert isinstance(denied, Denied)
    assert "colocated-0 is colocated, prefill-0 is prefill" in denied.reason


def test_an_offer_over_another_connection_is_denied(driver: CoreDriver) -> None:
    driver.do(FromWorker("decode-9", "x", register("decode-0", Role.DECODE, "x")))
    (denied,) = driver.sent_to("decode-9")
    assert isinstance(denied, Denied)
    assert "decode-0/x" in denied.reason
    assert "decode-9/x" in denied.reason


def test_a_denied_newcomer_does_not_push_out_the_worker_of_its_name(driver: CoreDriver) -> None:
    driver.join("prefill-0", Role.PREFILL, "b", fingerprint="model-2")
    worker = driver.core.registry.get("prefill-0")
    assert worker is not None
    assert worker.incarnation == "prefill-0-a"


def test_workers_hear_of_each_change_in_the_other_pool(driver: CoreDriver) -> None:
    driver.join("decode-0", Role.DECODE)
    assert driver.sent_to("prefill-0") == [peers_of(driver, "decode-0")]
    welcome, peers = driver.sent_to("decode-0")
    assert welcome == Welcome(heartbeat_s=0.5)
    assert peers == peers_of(driver, "prefill-0")
    driver.sent.clear()
    driver.join("decode-1", Role.DECODE)
    assert driver.sent_to("prefill-0") == [peers_of(driver, "decode-0", "decode-1")]
    assert driver.sent_to("decode-0") == []
    driver.sent.clear()
    driver.lose("decode-0")
    assert driver.sent_to("prefill-0") == [peers_of(driver, "decode-1")]


def test_a_new_process_replaces_the_old_one_of_its_name_and_its_links(driver: CoreDriver) -> None:
    driver.join("decode-0", Role.DECODE)
    driver.link("prefill-0", "decode-0")
    assert driver.core.registry.ready()[0]
    driver.join("decode-0", Role.DECODE, "b")
    assert len(driver.core.registry) == 2
    assert not driver.core.registry.ready()[0]
    # A word about the old process changes nothing.
    driver.say("prefill-0", LinkReady("decode-0", "decode-0-a", "loopback", 1.0, 1))
    assert not driver.core.registry.ready()[0]
    driver.link("prefill-0", "decode-0")
    assert driver.core.registry.ready()[0]


def test_registering_twice_is_answered_twice_and_counts_once(driver: CoreDriver) -> None:
    driver.join("prefill-0", Role.PREFILL)
    assert isinstance(driver.sent_to("prefill-0")[0], Welcome)
    assert len(driver.core.registry) == 1


def test_ready_names_what_is_missing(driver: CoreDriver) -> None:
    assert driver.core.registry.ready() == (False, "the decode pool is empty")
    driver.join("decode-0", Role.DECODE)
    assert driver.core.registry.ready() == (False, "no prefill worker is linked to a decode worker yet")
    driver.say("prefill-0", LinkFailed("decode-0", "decode-0-a", "no common transport"))
    assert "no common transport" in driver.core.registry.ready()[1]
    driver.link("prefill-0", "decode-0")
    assert driver.core.registry.ready() == (True, "1 prefill and 1 decode worker(s), 1 link(s)")


def test_a_worker_of_an_earlier_coordinator_is_told_to_start_anew(driver: CoreDriver) -> None:
    driver.do(FromWorker("decode-0", "of another coordinator", Heartbeat(stats())))
    assert driver.sent_to("decode-0") == [StartAnew()]
    driver.join("decode-0", Role.DECODE, "new")
    assert driver.core.registry.get("decode-0") is not None


def test_a_process_whose_name_another_has_taken_is_stopped_for_good(driver: CoreDriver) -> None:
    driver.join("prefill-0", Role.PREFILL, "b")
    driver.sent.clear()
    driver.do(FromWorker("prefill-0", "prefill-0-a", Heartbeat(stats())))
    assert driver.sent_to("prefill-0") == [Stop()]
    worker = driver.core.registry.get("prefill-0")
    assert worker is not None
    assert worker.incarnation == "prefill-0-b"


def test_a_server_that_stops_lets_nobody_start_anew(driver: CoreDriver) -> None:
    driver.do(Shutdown())
    driver.sent.clear()
    driver.do(FromWorker("decode-0", "of another coordinator", Heartbeat(stats())))
    driver.join("decode-1", Role.DECODE)
    assert driver.sent_to("decode-0") == driver.sent_to("decode-1") == [Stop()]


def test_the_pool_of_the_last_process_of_a_name_is_remembered_for_so_many_names(
    driver: CoreDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_REMEMBERED_POOLS", 2)
    for name in ("a", "b", "c"):
        driver.join(name, Role.PREFILL, num_blocks=8 + ord(name))
        assert driver.core.registry.past_num_blocks(name) is None
        driver.say(name, Left("done"))
    assert [driver.core.registry.past_num_blocks(name) for name in "abc"] == [None, 106, 107]


def test_counters_of_past_processes_are_kept(driver: CoreDriver) -> None:
    driver.say("prefill-0", Heartbeat(stats(steps_total=5.0)))
    driver.join("prefill-0", Role.PREFILL, "b")
    driver.say("prefill-0", Heartbeat(stats(steps_total=2.0)))
    assert driver.core.tally.gone_workers["prefill-0", Role.PREFILL]["steps_total"] == 5.0


def peers_of(driver: CoreDriver, *worker_ids: str) -> Peers:
    offers = (worker.info for worker in map(driver.core.registry.get, worker_ids) if worker is not None)
    return Peers(tuple(PeerInfo(o.worker_id, o.incarnation, o.role, o.endpoint) for o in offers))
