"""Workers of this host that are started and ended while the server runs: their names, cores, devices, pools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from twinpool.config import Role
from twinpool.coordinator.launch import Launcher, WorkerSpec
from twinpool.coordinator.scaler import Member, Premises
from twinpool.deploy import host as host_module
from twinpool.deploy.host import HostScaler
from twinpool.worker.process import EXIT_CONFIG

P, D = Role.PREFILL, Role.DECODE
SPECS = (
    WorkerSpec("prefill-0", P, (0,), 1, ("--model-dir=m", "--device=cuda:0")),
    WorkerSpec("decode-0", D, (1,), 1, ("--model-dir=m", "--device=cuda:1", "--num-blocks=7")),
)


class Ended:
    """A process that has ended: its settings were wrong."""

    pid = 1
    returncode = EXIT_CONFIG

    async def wait(self) -> int:
        return self.returncode


class Idle(Launcher):
    """A launcher whose workers are no processes: each waits until it is cancelled, or ends at once if it has a name of
    `failing`."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.has_given_up = asyncio.Event()
        super().__init__("tcp://nowhere", lambda *_: None, lambda *_: self.has_given_up.set(), {})

    async def _spawn(self, spec: WorkerSpec) -> asyncio.subprocess.Process:
        if spec.worker_id in self.failing:
            return Ended()  # type: ignore[return-value]
        await asyncio.Event().wait()
        raise AssertionError


def scaler(launcher: Launcher, members: Sequence[str] = ()) -> HostScaler:
    host = HostScaler(
        Premises(launcher, SPECS, lambda: dict.fromkeys(members, Member(D)), lambda: 40, "tcp://nowhere", {})
    )
    host.begin()
    return host


async def test_one_more_is_like_the_others_with_a_name_and_a_pool_of_its_own() -> None:
    launcher = Idle()
    host = scaler(launcher, members=("decode-1", "decode-3"))
    assert host.workers() == {"prefill-0": P, "decode-0": D}
    host.start(D)
    host.start(D)
    first, second = launcher.kept()[2:]
    assert [first.worker_id, second.worker_id] == ["decode-2", "decode-4"]
    assert (first.role, first.cores, first.threads) == (D, (), 1)
    # Devices in turn, and the pool of those that are there already.
    assert first.arguments == ("--model-dir=m", "--device=cuda:0", "--num-blocks=40")
    assert second.arguments == ("--model-dir=m", "--device=cuda:1", "--num-blocks=40")
    await launcher.stop(0.0, told=())


async def test_one_that_comes_gets_the_place_of_one_that_has_gone() -> None:
    launcher = Idle()
    host = scaler(launcher)
    host.stop("decode-0", D)
    host.stop("decode-0", D)
    host.stop("from-elsewhere", D)
    assert host.workers() == {"prefill-0": P}
    host.start(P)
    host.start(P)
    assert host.workers().keys() == {"prefill-0", "prefill-1", "prefill-2"}
    cores = [spec.cores for spec in launcher.kept()]
    assert cores == [(0,), (1,), ()]
    await launcher.stop(0.0, told=())


async def failed() -> tuple[Idle, HostScaler]:
    """A host whose decode-0 could not run."""
    launcher = Idle("decode-0")
    host = scaler(launcher)
    async with asyncio.timeout(10):
        await launcher.has_given_up.wait()
    launcher.failing = ()
    assert host.workers() == {"prefill-0": P}
    assert host.failed() == {"decode-0": "exit status 2"}
    return launcher, host


async def test_one_that_has_failed_is_told_of_until_another_one_takes_its_place() -> None:
    launcher, host = await failed()
    host.start(D)
    assert host.failed() == {}
    assert host.workers() == {"prefill-0": P, "decode-0": D}
    assert [spec.cores for spec in launcher.kept()] == [(0,), (1,)]
    await launcher.stop(0.0, told=())


async def test_one_that_starts_for_the_other_role_lets_nobody_forget_who_has_failed() -> None:
    launcher, host = await failed()
    host.start(P)
    assert host.failed() == {"decode-0": "exit status 2"}
    await launcher.stop(0.0, told=())


async def test_one_that_has_failed_long_ago_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, host = await failed()
    monkeypatch.setattr(host_module, "FAILURE_SHOWN_S", 0.0)
    assert host.failed() == {}
    await launcher.stop(0.0, told=())


async def test_a_role_that_was_changed_holds_for_the_next_start() -> None:
    launcher = Idle()
    host = scaler(launcher)
    host.assign("decode-0", P)
    host.assign("from-elsewhere", P)
    assert host.workers() == {"prefill-0": P, "decode-0": P}
    assert not launcher.keeps(D)
    await launcher.stop(0.0, told=())
