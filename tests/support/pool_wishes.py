"""Wishes for the pools of a coordinator's core, its answers, and what workers do of it."""

from __future__ import annotations

from typing import Any

from support.coordinator_core import CoreDriver
from twinpool.config import Role
from twinpool.coordinator.events import (
    Agree,
    ChangeRole,
    Command,
    Decline,
    Event,
    Reassign,
    Retire,
    StartWorker,
)
from twinpool.coordinator.pool_plan import PoolChange
from twinpool.messages import Left, Reserve


def three(**settings: Any) -> CoreDriver:
    """Prefill worker P, decode workers D and E, linked."""
    driver = CoreDriver(**settings)
    driver.pair()
    driver.join("E", Role.DECODE)
    driver.link("P", "E")
    driver.sent.clear()
    return driver


def agreed(commands: list[Command]) -> tuple[PoolChange, ...]:
    (answer,) = [command for command in commands if isinstance(command, Agree | Decline)]
    assert isinstance(answer, Agree), answer
    return answer.changes


def declined(driver: CoreDriver, wish: Event) -> str:
    """Why it is not done; nothing of it was begun."""
    commands = driver.do(wish)
    (answer,) = [command for command in commands if isinstance(command, Agree | Decline)]
    assert isinstance(answer, Decline), answer
    assert not any(isinstance(command, Reassign | Retire | StartWorker) for command in commands)
    return answer.error.message


def change(driver: CoreDriver, worker_id: str, role: Role, wait_s: float = 1.0) -> list[Command]:
    return driver.do(ChangeRole("t", worker_id, role, wait_s))


def generating(driver: CoreDriver, request_id: str = "r") -> str:
    """A request that has been handed off and has two tokens; returns the decode worker that has it."""
    driver.submit(request_id, max_tokens=8)
    (reserved,) = [send for send in driver.sent if isinstance(send.message, Reserve)]
    driver.report(request_id=request_id)
    driver.token("P", 0, request_id=request_id)
    driver.handoff(worker_id=reserved.worker_id, request_id=request_id)
    driver.token(reserved.worker_id, 1, request_id=request_id)
    driver.sent.clear()
    return reserved.worker_id


def takes_role(driver: CoreDriver, worker_id: str, role: Role) -> None:
    """The worker's process does as it was told, and comes back in its new role."""
    driver.say(worker_id, Left(f"becomes {role}"))
    before = driver.incarnations[worker_id]
    driver.join(worker_id, role, incarnation="again", succeeds=before)
