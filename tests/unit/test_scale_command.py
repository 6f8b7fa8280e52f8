"""Workers of a cluster: what its tool is told, by real small commands that do it, fail, hang, or are none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server import wait_for

from twinpool.config import Role
from twinpool.coordinator.launch import Launcher, WorkerSpec
from twinpool.coordinator.scaler import Member, Premises
from twinpool.deploy.command import CommandScaler, ScaleCommand
from twinpool.deploy.counts import Counts, Order
from twinpool.errors import ConfigError

P, D = Role.PREFILL, Role.DECODE
LEAVING = Member(D, is_leaving=True)
FLAGS = ("--model-dir=/models/a b", "--workers-on-host=3", "--device=cuda:0", "--block-size=8")
SPECS = tuple(WorkerSpec(f"{role}-{i}", role, (), 1, FLAGS) for role, i in ((P, 0), (D, 0), (D, 1)))


# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────


def here(**roles: Role) -> dict[str, Member]:
    """Workers that have joined and stay."""
    return {name: Member(role) for name, role in roles.items()}


def counts(*roles: Role) -> Counts:
    """Of which the tool has been told."""
    made = Counts()
    made.begin(roles)
    while made.next_order() is not None:
        made.done()
    return made


def test_the_numbers_of_the_start_are_told_role_by_role() -> None:
    made = Counts()
    made.begin((P, D, D))
    assert made.next_order() == Order(P, 1)
    assert made.next_order() is None, "one after the other"
    made.done()
    assert made.next_order() == Order(D, 2)
    made.done()
    assert made.next_order() is None


def test_what_is_wanted_while_the_tool_is_told_is_told_after_it() -> None:
    made = counts(P, D)
    made.start(D, {})
    assert made.next_order() == Order(D, 2)
    made.start(D, {})
    made.start(D, {})
    made.done()
    assert made.next_order() == Order(D, 4)


def test_a_worker_that_has_changed_its_role_counts_as_what_it_was_started_as() -> None:
    made = counts(P, D, D)
    made.assign("e", P)
    assert made.awaited(here(p=P, d=D, e=P)) == {}
    made.stop("e", P, here(p=P, d=D) | {"e": Member(P, is_leaving=True)})
    assert made.next_order() == Order(D, 1, ("e",))
    made.assign("d", P)
    made.assign("d", D)  # called off
    made.done()
    assert made.awaited(here(p=P, d=D)) == {}


def test_several_that_leave_at_once_and_one_that_died_on_its_way_are_that_many_fewer() -> None:
    made = counts(P, D, D, D, D)
    members = here(p=P, g=D) | {"d": LEAVING, "e": LEAVING}
    made.stop("d", D, members)
    made.stop("e", D, members)
    made.stop("f", D, members)
    assert made.next_order() == Order(D, 1, ("d", "e", "f"))


def test_the_tool_is_never_told_of_fewer_than_stay() -> None:
    """Two were awaited and called off, and have come all the same; then one is drained."""
    made = counts(P, D)
    made.start(D, here(p=P, d=D))
    made.stop("decode-awaited-1", D, here(p=P, d=D))
    assert made.next_order() is None
    made.stop("e", D, here(p=P, d=D) | {"e": LEAVING})
    assert made.next_order() is None, "one stays"
    made.start(D, here(p=P, d=D, f=D))
    assert made.next_order() == Order(D, 3, ("e",)), "two are there"


def test_who_is_awaited_has_a_name_and_can_be_stopped_by_it() -> None:
    made = counts(P, D, D, D)
    members = here(p=P, d=D) | {"decode-awaited-1": Member(D)}
    assert made.awaited(members) == {"decode-awaited-2": D}
    made.stop("decode-awaited-2", D, members)
    assert made.next_order() == Order(D, 2), "it is nobody that the tool could be told of"
    assert made.awaited(members) == {}


def test_of_those_that_are_called_off_before_they_come_the_tool_learns_no_name() -> None:
    members = here(p=P, d=D)
    made = counts(P, D)
    made.start(D, members)
    made.start(D, members)
    assert made.next_order() == Order(D, 3)
    made.done()
    made.stop("decode-awaited-1", D, members)
    made.stop("decode-awaited-2", D, members)
    assert made.next_order() == Order(D, 1)


def test_what_could_not_be_told_is_not_wanted_any_more() -> None:
    made = counts(P, D, D)
    made.stop("d", D, here(p=P, e=D) | {"d": LEAVING})
    made.start(P, here(p=P))
    assert made.next_order() == Order(P, 2)
    made.failed()
    assert made.awaited(here(p=P, e=D)) == {}
    assert made.next_order() == Order(D, 1, ("d",))
    made.failed()
    assert made.next_order() is None
    assert made.awaited(here(p=P, e=D)) == {"decode-awaited-1": D}, "the tool may start it again"


@given(
    st.lists(st.tuples(st.sampled_from(["start", "stop", "next", "done", "failed"]), st.sampled_from([P, D])))
)
def test_however_it_goes_the_tool_is_told_the_number_that_is_wanted_in_the_end(
    steps: list[tuple[str, Role]],
) -> None:
    made, told = counts(P, D), {P: 1, D: 1}
    for step, role in steps:
        match step:
            case "start":
                made.start(role, {})
            case "stop":
                made.stop("w", role, {})
            case "next":
                made.next_order()
            case "done" if (order := made.order) is not None:
                told[order.role] = order.count
                made.done()
            case "failed" if made.order is not None:
                made.failed()
    while (order := made.order or made.next_order()) is not None:
        told[order.role] = order.count
        made.done()
    assert sum(told.values()) == made.num_wanted()
    assert min(told.values()) >= 0


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────


class Still:
    """A clock that does not go."""

    def now(self) -> float:
        return 5.0


def script(folder: Path, body: str) -> Path:
    path = folder / "scale"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


@asynccontextmanager
async def scaling(
    command: str, members: dict[str, Member], timeout_s: float | None = None
) -> AsyncIterator[CommandScaler]:
    launcher = Launcher("tcp://here", lambda *_: None, lambda *_: None, {})
    premises = Premises(
        launcher, SPECS, lambda: members, lambda: None, "tcp://here", {"TWINPOOL_JOIN_TOKEN": "t"}
    )
    made = CommandScaler(ScaleCommand.parse(command, timeout_s), premises, Still())
    try:
        yield made
    finally:
        await made.close()
        await launcher.stop(0.0, told=())


def is_running(pid: int) -> bool:
    """Whether that process is there, and no zombie that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def told(scaler: CommandScaler) -> None:
    """Waits until the command has ended."""
    assert scaler._task is not None
    async with asyncio.timeout(20):
        await asyncio.wait({scaler._task})


async def test_the_command_gets_numbers_as_arguments_and_the_rest_in_its_environment(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    path = script(
        tmp_path,
        f'echo "$*|$TWINPOOL_ROLE $TWINPOOL_COUNT $TWINPOOL_GONE|$TWINPOOL_CONNECT $TWINPOOL_JOIN_TOKEN|'
        f'$TWINPOOL_WORKER_ARGUMENTS" >> {lines}',
    )
    members = here(a=P, b=D, c=D)
    async with scaling(f"{path} twinpool-{{role}} '{{count}}; true' {{gone}}", members) as scaler:
        scaler.begin()
        await told(scaler)
        assert scaler.workers() == {"a": P, "b": D, "c": D}
        scaler.start(D)
        scaler.start(D)
        assert scaler.workers().keys() == {*members, "decode-awaited-1", "decode-awaited-2"}
        assert scaler.waits_for() == "the scale command to begin"
        await told(scaler)
        assert "a worker to join; the scale command has ended" in scaler.waits_for()
        members["c"] = LEAVING
        scaler.stop("c", D)
        await told(scaler)
        assert scaler.failed() == {}
    rest = "|tcp://here t|'--model-dir=/models/a b' --block-size=8"
    assert lines.read_text().splitlines() == [
        f"twinpool-prefill 1; true |prefill 1 {rest}",
        f"twinpool-decode 2; true |decode 2 {rest}",
        f"twinpool-decode 4; true |decode 4 {rest}",
        f"twinpool-decode 3; true c|decode 3 c{rest}",
    ]


async def test_a_command_that_fails_is_quoted_and_run_again_when_it_is_wanted_again(tmp_path: Path) -> None:
    path = script(tmp_path, f'test -e {tmp_path}/quota || {{ echo "no quota for $1" >&2; exit 3; }}')
    async with scaling(f"{path} {{role}}", here(a=P)) as scaler:
        scaler.start(D)
        await told(scaler)
        assert scaler.failed() == {
            "decode workers": f"not 1 of them: `{path} decode` ended with status 3: no quota for decode"
        }
        assert scaler.workers() == {"a": P}
        (tmp_path / "quota").touch()
        scaler.start(D)
        await told(scaler)
        assert scaler.failed() == {}
        assert scaler.workers() == {"a": P, "decode-awaited-1": D}


async def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    path = script(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    async with scaling(str(path), {}, timeout_s=0.3) as scaler:
        scaler.start(D)
        await told(scaler)
        (reason,) = scaler.failed().values()
        assert "has not ended within 0.3 s (--scale-timeout), and was killed" in reason
    wait_for("it has ended", lambda: not is_running(int((tmp_path / "pid").read_text())))


async def test_a_command_under_way_is_told_of_and_ends_with_the_server(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    path = script(tmp_path, f"echo $$ > {tmp_path}/begun; exec sleep 600")
    async with scaling(str(path), {}) as scaler:
        scaler.start(D)
        assert scaler.workers() == {"decode-awaited-1": D}
        pid = int(await asyncio.to_thread((tmp_path / "begun").read_text))
        assert "the scale command to end (decode 1, 0 s so far)" in scaler.waits_for()
        assert is_running(pid)
    assert not is_running(pid)


async def test_what_a_command_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    path = script(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid")
    async with scaling(str(path), {}) as scaler:
        scaler.start(D)
        await told(scaler)
        assert scaler.failed() == {}
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it was there


async def test_a_command_that_is_gone_is_told_of(tmp_path: Path) -> None:
    path = script(tmp_path, "true")
    async with scaling(str(path), {}) as scaler:
        path.unlink()
        scaler.start(D)
        await told(scaler)
        (reason,) = scaler.failed().values()
        assert reason == f"not 1 of them: `{path}` cannot be started: No such file or directory"


def test_what_is_no_command_is_refused_at_the_start(tmp_path: Path) -> None:
    path = script(tmp_path, "true")
    for text, told in (
        ("'", "which is no command line: No closing quotation"),
        ("", "allowed: a command, like"),
        ("/nowhere/scale {role}", "'/nowhere/scale' is no program that can be run"),
        (f"{path} {{workers}}", "in braces may be role, count, gone"),
        (f"{path} {{role.value}}", "in braces may be role, count, gone"),
        (f"{path} {{0}}", "in braces may be role, count, gone"),
        (f"{path} {{", "in braces may be role, count, gone"),
    ):
        with pytest.raises(ConfigError) as caught:
            ScaleCommand.parse(text, None)
        assert told in str(caught.value), text
    with pytest.raises(ConfigError, match=r"--scale-timeout is 0\.0; allowed: above 0"):
        ScaleCommand.parse(str(path), 0.0)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"make it executable \(chmod \+x\)"):
        ScaleCommand.parse(str(path), None)
