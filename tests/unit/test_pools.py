"""What the coordinator's core does about wishes for its pools: who leaves, and what becomes of its requests."""

from __future__ import annotations

from support.coordinator_core import CoreDriver, register, submission
from support.pool_wishes import agreed, change, declined, generating, takes_role, three

from twinpool.config import MOST_WORKERS, Role
from twinpool.coordinator.custody import HANDED_ON
from twinpool.coordinator.events import (
    ChangeRole,
    Command,
    Drain,
    DrainWorker,
    EndProcess,
    FromWorker,
    Reassign,
    Retire,
    SetPools,
    StartWorker,
    Tick,
    WorkerLost,
)
from twinpool.coordinator.pool_plan import ChangeKind, PoolChange
from twinpool.errors import PoolRefused, UnknownWorker
from twinpool.messages import Left, Prefill, Reserve, Stop, TakeRole
from twinpool.metrics import CoordinatorMetric
from twinpool.request import FinishReason

P, D = Role.PREFILL, Role.DECODE
ROLE, DRAIN, START = ChangeKind.ROLE, ChangeKind.DRAIN, ChangeKind.START


# ── a role ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_worker_is_told_at_once_and_comes_back_with_its_cache() -> None:
    driver = three()
    driver.submit("r", num_prompt=100, max_tokens=1)
    driver.token("P", 0, FinishReason.LENGTH)
    driver.report()
    index = driver.core._router._index
    chain = list(index._holders)
    assert chain
    commands = change(driver, "E", P)
    assert agreed(commands) == (PoolChange(ROLE, P, "E"),)
    assert Reassign("E", P) in commands
    assert driver.sent_to("E") == [TakeRole(P)]
    index.add(chain, driver.incarnations["E"])
    takes_role(driver, "E", P)
    assert all(driver.incarnations["E"] in holders for holders in index._holders.values())
    assert {worker.worker_id for worker in driver.core.registry.of_role(P)} == {"P", "E"}
    assert driver.count(CoordinatorMetric.ROLE_CHANGES, P) == 1
    assert sum(driver.core.tally.counts(CoordinatorMetric.WORKERS_LOST).values()) == 0


def test_who_leaves_gets_nothing_new_and_what_it_has_may_end() -> None:
    driver = three()
    leaver = generating(driver)
    stayer = {"D": "E", "E": "D"}[leaver]
    change(driver, leaver, P, wait_s=5.0)
    for number in range(3):
        driver.submit(f"new-{number}")
    assert driver.sent_to(leaver) == []
    assert [type(message) for message in driver.sent_to(stayer)] == [Reserve] * 3
    driver.token(leaver, 2, FinishReason.STOP)
    assert driver.sent_to(leaver) == [TakeRole(P)]
    assert driver.tokens() == [1000, 1001, 1002]


def test_what_has_not_ended_in_time_goes_on_elsewhere_and_is_charged_to_nobody() -> None:
    driver = three(max_attempts=1, retry_budget=0)
    leaver = generating(driver)
    stayer = {"D": "E", "E": "D"}[leaver]
    change(driver, leaver, P, wait_s=1.0)
    driver.advance(0.9)
    assert driver.sent_to(leaver) == []
    driver.heartbeat("P", "D", "E")
    driver.advance(0.2)
    (prefill,) = [message for message in driver.sent_to("P") if isinstance(message, Prefill)]
    assert prefill.job.token_ids[-2:] == (1000, 1001)
    assert any(isinstance(message, Reserve) for message in driver.sent_to(stayer))
    assert not any(isinstance(message, TakeRole) for message in driver.sent_to(leaver))
    assert driver.answer_cancels() == 1
    assert driver.sent_to(leaver) == [TakeRole(P)]
    assert driver.count(CoordinatorMetric.ATTEMPTS_LOST, HANDED_ON) == 1
    driver.token("P", 2, attempt=2)
    driver.handoff(attempt=2, worker_id=stayer)
    driver.token(stayer, 3, FinishReason.STOP, attempt=2)
    assert driver.tokens() == [1000, 1001, 1002, 1003]
    assert driver.finish() is FinishReason.STOP


def test_a_request_that_fits_nowhere_else_ends_where_it_is() -> None:
    driver = three()
    driver.join("L", D, num_blocks=128)
    driver.link("P", "L")
    for worker_id in ("D", "E"):
        driver.do(DrainWorker("t", worker_id, 0.0))
        driver.say(worker_id, Left("drained"))
    assert generating(driver) == "L"
    driver.core._custody.requests["r"].submission = submission("r", max_tokens=1500)
    driver.join("S", D, num_blocks=64)
    driver.link("P", "S")
    change(driver, "L", P, wait_s=0.0)
    assert driver.sent_to("L") == []
    driver.token("L", 2, FinishReason.STOP)
    assert driver.sent_to("L") == [TakeRole(P)]
    assert driver.tokens() == [1000, 1001, 1002]


def test_a_prompt_under_way_is_handed_on_too() -> None:
    driver = three()
    driver.join("Q", P)
    driver.link("Q", "D")
    driver.link("Q", "E")
    driver.submit()
    (leaver,) = [send.worker_id for send in driver.sent if isinstance(send.message, Prefill)]
    stayer = {"P": "Q", "Q": "P"}[leaver]
    driver.sent.clear()
    change(driver, leaver, D, wait_s=0.0)
    assert [message.job.attempt for message in driver.sent_to(stayer) if isinstance(message, Prefill)] == [2]
    assert driver.answer_cancels() == 2
    assert driver.sent_to(leaver) == [TakeRole(D)]


def test_a_register_that_overtakes_the_left_of_the_same_process_ends_no_process() -> None:
    driver = three()
    change(driver, "E", P)
    before = driver.incarnations["E"]
    driver.incarnations["E"] = "E-again"
    offer = register("E", P, "E-again", succeeds=before)
    commands = driver.do(FromWorker("E", "E-again", offer))
    assert not any(isinstance(command, EndProcess) for command in commands)
    assert driver.core.registry.get("E").role is P  # type: ignore[union-attr]


def test_a_process_that_is_out_of_reach_because_it_changes_its_role_is_not_ended() -> None:
    driver = three()
    change(driver, "E", P)
    commands = driver.do(WorkerLost("E", driver.incarnations["E"], "no message reaches it"))
    assert not any(isinstance(command, EndProcess) for command in commands)


def test_who_was_told_to_go_and_stays_counts_as_lost_in_the_end() -> None:
    driver = three(heartbeat_s=0.1, lease_s=1.0)
    change(driver, "E", P)
    commands: list[Command] = []
    for _ in range(45):
        driver.heartbeat("P", "D", "E")
        driver.now += 0.1
        commands += driver.do(Tick())
    assert [c.worker_id for c in commands if isinstance(c, EndProcess)] == ["E"]
    assert driver.count(CoordinatorMetric.WORKERS_LOST, D) == 1


def test_a_change_is_called_off_when_the_others_of_the_pool_are_lost() -> None:
    driver = three()
    leaver = generating(driver)
    stayer = {"D": "E", "E": "D"}[leaver]
    change(driver, leaver, P, wait_s=60.0)
    driver.lose(stayer)
    assert driver.core.registry.get(leaver).stays  # type: ignore[union-attr]
    driver.submit("next")
    assert any(isinstance(message, Reserve) for message in driver.sent_to(leaver))


# ── a drain ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_drained_worker_is_told_to_stop_and_not_started_again() -> None:
    driver = three()
    commands = driver.do(DrainWorker("t", "E", 1.0))
    assert agreed(commands) == (PoolChange(DRAIN, D, "E"),)
    assert Retire("E", D) in commands
    assert driver.sent_to("E") == [Stop()]
    driver.say("E", Left("the coordinator said so"))
    assert driver.count(CoordinatorMetric.WORKERS_DRAINED, D) == 1
    assert driver.count(CoordinatorMetric.WORKERS_LOST, D) == 0


def test_a_worker_that_dies_while_it_is_drained_is_not_started_again() -> None:
    driver = three()
    leaver = generating(driver)
    assert Retire(leaver, D) not in driver.do(DrainWorker("t", leaver, 60.0))
    assert Retire(leaver, D) in driver.do(WorkerLost(leaver, driver.incarnations[leaver], "killed"))


def test_a_server_that_stops_takes_nobody_out_of_what_is_kept() -> None:
    driver = three()
    leaver = generating(driver)
    driver.do(DrainWorker("t", leaver, 60.0))
    driver.do(Drain())
    assert Retire(leaver, D) not in driver.do(WorkerLost(leaver, driver.incarnations[leaver], "killed"))


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_the_pools_cannot_be_is_refused_in_words() -> None:
    driver = three()
    assert "no worker 'X' has joined; those that have: D, E, P" in declined(driver, DrainWorker("t", "X", 0))
    assert "P is the last prefill worker" in declined(driver, DrainWorker("t", "P", 0))
    assert "P is the last prefill worker" in declined(driver, ChangeRole("t", "P", D, 0))
    assert "cannot become colocated" in declined(driver, ChangeRole("t", "D", Role.COLOCATED, 0))
    generating(driver)
    assert agreed(change(driver, "D", D)) == ()
    leaver = generating(driver, "s")
    change(driver, leaver, P, wait_s=60.0)
    assert agreed(change(driver, leaver, P)) == ()
    assert f"{leaver} becomes a prefill worker already" in declined(driver, DrainWorker("t", leaver, 0))
    driver.do(Drain())
    assert "stopping" in declined(driver, SetPools("t", 1, 1, 0, {}))


def test_an_unknown_worker_and_an_impossible_pool_are_errors_of_their_own() -> None:
    assert (UnknownWorker("").status, PoolRefused("").status) == (404, 409)


def test_a_worker_that_must_keep_its_role_says_why() -> None:
    driver = three()
    driver.join("H", D, fixed_role="a hybrid helps the other pool by itself")
    assert "H stays a decode worker: a hybrid" in declined(driver, ChangeRole("t", "H", P, 0))
    assert agreed(driver.do(DrainWorker("t", "H", 0.0)))


def test_colocated_workers_are_no_two_pools() -> None:
    driver = CoreDriver()
    driver.join("C", Role.COLOCATED, fixed_role="a colocated worker does both already")
    driver.join("K", Role.COLOCATED, fixed_role="a colocated worker does both already")
    assert "C is colocated" in declined(driver, SetPools("t", 1, 1, 0, {}))
    assert "does both" in declined(driver, ChangeRole("t", "C", P, 0))
    assert agreed(driver.do(DrainWorker("t", "C", 0.0))) == (PoolChange(DRAIN, Role.COLOCATED, "C"),)
    told = declined(driver, DrainWorker("t", "K", 0))
    assert "K is the last colocated worker" in told
    assert "another first, like with `twinpool worker --role colocated`" in told


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_numbers_are_reached_by_roles_first_then_by_starts() -> None:
    driver = three()
    kept = {"P": P, "D": D, "E": D}
    commands = driver.do(SetPools("t", 3, 1, 0.0, kept))
    assert agreed(commands) == (PoolChange(ROLE, P, "D"), PoolChange(START, P))
    assert StartWorker(P) in commands
    assert driver.sent_to("D") == [TakeRole(P)]
    takes_role(driver, "D", P)
    kept = {"P": P, "D": P, "E": D, "prefill-1": P}
    assert agreed(driver.do(SetPools("t", 3, 1, 0.0, kept))) == ()
    commands = driver.do(SetPools("t", 2, None, 0.0, kept))
    assert agreed(commands) == (PoolChange(DRAIN, P, "prefill-1"),)
    assert Retire("prefill-1", P) in commands


def test_where_nobody_can_start_workers_nothing_is_begun() -> None:
    driver = three()
    assert "run `twinpool worker`" in declined(
        driver, SetPools("t", 3, 1, 0.0, {}, "run `twinpool worker` there")
    )
    assert agreed(driver.do(SetPools("t", 2, 1, 0.0, {}, "run `twinpool worker` there")))


def test_two_operators_who_want_the_opposite_at_once_get_one_of_both_and_a_refusal() -> None:
    driver = three()
    assert agreed(driver.do(SetPools("one", 2, 1, 0.0, {}))) == (PoolChange(ROLE, P, "D"),)
    assert "try again when they have come" in declined(driver, SetPools("two", 1, 2, 0.0, {}))
    assert agreed(driver.do(SetPools("three", 2, 1, 0.0, {}))) == ()
    takes_role(driver, "D", P)
    driver.link("D", "E")
    assert agreed(driver.do(SetPools("two", 1, 2, 0.0, {}))) == (PoolChange(ROLE, D, "P"),)


def test_more_workers_than_a_server_may_have_are_refused_and_none_is_started() -> None:
    driver = three()
    told = declined(driver, SetPools("t", MOST_WORKERS, 1, 0.0, {}))
    assert told == f"that would be {MOST_WORKERS + 1} workers; a server has {MOST_WORKERS} at most"
    assert len(agreed(driver.do(SetPools("t", MOST_WORKERS - 1, 1, 0.0, {})))) == MOST_WORKERS - 2


def test_a_worker_that_is_on_its_way_is_not_called_back_and_one_that_dies_then_comes_back_as_wanted() -> None:
    driver = three()
    leaver = generating(driver)
    change(driver, leaver, P, wait_s=60.0)
    assert "becomes a prefill worker already; wait" in declined(driver, ChangeRole("t", leaver, D, 0))
    commands = driver.do(WorkerLost(leaver, driver.incarnations[leaver], "killed"))
    assert not any(isinstance(command, Reassign | Retire) for command in commands), (
        "it is still to become one"
    )
    driver.join(leaver, P, incarnation="again")
    driver.link(leaver, {"D": "E", "E": "D"}[leaver])
    assert driver.core.registry.get(leaver).stays  # type: ignore[union-attr]
    assert agreed(change(driver, leaver, P)) == ()
