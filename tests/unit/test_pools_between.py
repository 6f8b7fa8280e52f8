"""What the coordinator's core does about its pools where workers are not linked, or are between two roles."""

from __future__ import annotations

import pytest
from support.coordinator_core import CoreDriver
from support.pool_wishes import agreed, change, declined, generating, takes_role, three

from twinpool.config import CoordinatorConfig, Role
from twinpool.coordinator.events import ChangeRole, DrainWorker, SetPools
from twinpool.coordinator.pool_plan import ChangeKind, PoolChange
from twinpool.coordinator.pool_status import pool_status
from twinpool.coordinator.scaler import Member
from twinpool.coordinator.server import Coordinator
from twinpool.messages import Left, LinkFailed, TakeRole

P, D = Role.PREFILL, Role.DECODE
ROLE, DRAIN, START = ChangeKind.ROLE, ChangeKind.DRAIN, ChangeKind.START

# ── links ───────────────────────────────────────────────────────────────────────────────────────────────────


def with_a_worker_that_nobody_is_linked_to() -> CoreDriver:
    """Prefill worker P is linked to D and not to E."""
    driver = CoreDriver()
    driver.pair()
    driver.join("E", D)
    driver.sent.clear()
    return driver


def unlink(driver: CoreDriver, prefill: str, decode: str) -> None:
    driver.say(prefill, LinkFailed(decode, driver.incarnations[decode], "refused"))


def test_the_last_that_requests_can_reach_is_not_let_go() -> None:
    driver = with_a_worker_that_nobody_is_linked_to()
    told = declined(driver, DrainWorker("t", "D", 0))
    assert "D is the last decode worker that is linked" in told
    assert "wait until E is linked" in told
    assert "D is the last" in declined(driver, ChangeRole("t", "D", P, 0))
    driver.link("P", "E")
    assert agreed(driver.do(DrainWorker("t", "D", 0)))


def test_a_link_with_a_worker_that_leaves_reaches_nobody() -> None:
    driver = with_a_worker_that_nobody_is_linked_to()
    driver.join("Q", P)
    driver.link("Q", "D")
    driver.link("P", "E")
    assert agreed(change(driver, "P", D, wait_s=60.0))
    assert "D is the last decode worker that is linked" in declined(driver, DrainWorker("t", "D", 0))


def test_who_cannot_be_reached_may_go() -> None:
    driver = with_a_worker_that_nobody_is_linked_to()
    assert agreed(driver.do(DrainWorker("t", "E", 0))) == (PoolChange(DRAIN, D, "E"),)
    driver = with_a_worker_that_nobody_is_linked_to()
    assert agreed(driver.do(SetPools("t", 2, 1, 0.0, {}))) == (PoolChange(ROLE, P, "E"),)


def test_a_change_is_called_off_when_the_links_of_the_others_fail() -> None:
    driver = three()
    leaver = generating(driver)
    stayer = {"D": "E", "E": "D"}[leaver]
    change(driver, leaver, P, wait_s=60.0)
    unlink(driver, "P", stayer)
    assert driver.core.registry.get(leaver).stays  # type: ignore[union-attr]


def test_a_stream_is_not_handed_on_while_nobody_could_go_on_with_it() -> None:
    driver = three()
    leaver = generating(driver)
    stayer = {"D": "E", "E": "D"}[leaver]
    change(driver, leaver, P, wait_s=0.5)
    driver.lose("P")
    driver.advance(1.0)
    assert driver.answer_cancels() == 0
    driver.join("P", P, incarnation="again")
    assert driver.answer_cancels() == 0
    driver.link("P", stayer)
    assert driver.answer_cancels() == 1
    assert driver.sent_to(leaver)[-1] == TakeRole(P)


# ── between two roles ───────────────────────────────────────────────────────────────────────────────────────


def between(driver: CoreDriver) -> None:
    """E has left the decode pool, and has not come to the other yet."""
    assert agreed(change(driver, "E", P)) == (PoolChange(ROLE, P, "E"),)
    driver.say("E", Left("becomes prefill"))
    assert driver.core.registry.get("E") is None


@pytest.mark.parametrize("kept", [{}, {"P": P, "D": D, "E": P}], ids=["by hand", "of this server"])
def test_a_wish_that_is_repeated_while_a_worker_is_between_two_roles_begins_nothing(
    kept: dict[str, Role],
) -> None:
    driver = three()
    between(driver)
    assert agreed(driver.do(SetPools("t", 2, 1, 0.0, kept))) == ()
    assert agreed(change(driver, "E", P)) == ()
    assert "E becomes a prefill worker already" in declined(driver, ChangeRole("t", "E", D, 0))
    assert "E becomes a prefill worker already" in declined(driver, DrainWorker("t", "E", 0))
    assert "try again when they have come" in declined(driver, SetPools("t", 1, 1, 0.0, kept))
    takes_role(driver, "E", P)
    assert driver.core.registry.changing == {}
    assert agreed(driver.do(SetPools("t", 2, 1, 0.0, kept))) == ()


def test_an_operator_sees_a_worker_that_is_between_two_roles() -> None:
    driver = three()
    between(driver)
    (shown,) = [
        worker
        for worker in pool_status(driver.core.registry, None, driver.now)["workers"]
        if worker["worker"] == "E"
    ]
    assert (shown["state"], shown["becomes"], shown["links"]) == ("changes role", "prefill", [])


def test_who_does_not_come_within_the_time_of_a_start_is_not_counted_on() -> None:
    driver = three(start_timeout_s=60.0)
    between(driver)
    driver.now += 59.0
    driver.heartbeat("P", "D")
    assert agreed(driver.do(SetPools("t", 2, 1, 0.0, {}))) == ()
    driver.now += 2.0
    driver.heartbeat("P", "D")
    assert agreed(driver.do(SetPools("t", 2, 1, 0.0, {}))) == (PoolChange(START, P),)


def test_who_was_lost_before_it_left_is_not_counted_on() -> None:
    driver = three()
    leaver = generating(driver)
    change(driver, leaver, P, wait_s=60.0)
    driver.lose(leaver)
    assert driver.core.registry.changing == {}


def test_the_server_counts_a_worker_that_is_between_two_roles_among_its_members() -> None:
    driver, server = three(), Coordinator(CoordinatorConfig(), (), on_failure=lambda _: None)
    server._core = driver.core
    between(driver)
    assert server.members().keys() == {"P", "D", "E"}
    takes_role(driver, "E", P)
    assert server.members()["E"] == Member(P)
