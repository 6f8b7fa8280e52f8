"""The launcher with real processes: which ends are followed by another start, and which are final."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest

from twinpool.config import Role
from twinpool.coordinator import launch
from twinpool.coordinator.launch import RESTARTS_ALLOWED, Launcher, WorkerSpec, share_cores
from twinpool.worker.process import EXIT_CONFIG, EXIT_FAILED

DEADLINE_S = 20.0
SPEC = WorkerSpec("decode-0", Role.DECODE, (), 1, ())


class Scripted(Launcher):
    """A launcher whose workers are processes that exit with `status` after `seconds`, or cannot be started (None)."""

    def __init__(self, status: int | None, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.exits: list[str] = []
        self.num_starts = 0
        self.has_started = asyncio.Event()
        self.arguments: list[tuple[str, ...]] = []
        self.given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        super().__init__(
            "tcp://nowhere", self._exited, lambda _, reason: self.given_up.set_result(reason), {}
        )
        self._status = status

    def _exited(self, worker_id: str, pid: int, reason: str) -> None:
        assert (worker_id, pid > 0) == (SPEC.worker_id, True)
        self.exits.append(reason)
        self.keep_pool_size(worker_id, 100 + len(self.exits))

    async def _spawn(self, spec: WorkerSpec) -> asyncio.subprocess.Process:
        self.num_starts += 1
        self.has_started.set()
        self.arguments.append(spec.arguments)
        if self._status is None:
            raise OSError(24, "Too many open files")
        code = f"import os, time; time.sleep({self._seconds}); os._exit({self._status})"
        return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code)


async def outcome(status: int | None) -> tuple[Scripted, str]:
    """The launcher after it has given up, and its reason."""
    launcher = Scripted(status)
    launcher.start([SPEC])
    assert launcher.keeps(Role.DECODE)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return launcher, await launcher.given_up
    finally:
        await launcher.stop(0.0, told=())


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(launch, "LONGEST_BACKOFF_S", 0.002)


async def test_a_worker_that_dies_is_started_again_a_bounded_number_of_times() -> None:
    launcher, reason = await outcome(EXIT_FAILED)
    assert reason == "exit status 1"
    assert launcher.exits == [reason] * (1 + RESTARTS_ALLOWED)
    assert not launcher.keeps(Role.DECODE)
    assert launcher.names() == frozenset(), "its name is free"


async def test_a_worker_that_is_started_again_gets_the_pool_that_it_had() -> None:
    launcher, _ = await outcome(EXIT_FAILED)
    assert launcher.arguments == [(), *[("--num-blocks=101",)] * RESTARTS_ALLOWED]


async def test_a_worker_with_a_wrong_setting_is_not_started_again() -> None:
    launcher, reason = await outcome(EXIT_CONFIG)
    assert launcher.exits == [reason] == ["exit status 2"]


@pytest.mark.parametrize("status", [0, EXIT_FAILED, EXIT_CONFIG])
async def test_a_worker_that_ends_while_the_server_stops_is_neither_started_again_nor_given_up(
    status: int,
) -> None:
    launcher = Scripted(status)
    launcher.start([SPEC])
    try:
        async with asyncio.timeout(DEADLINE_S):
            await launcher.has_started.wait()
            launcher.start_no_more()
            await asyncio.gather(*(running.task for running in launcher._running.values() if running.task))
        assert (launcher.num_starts, len(launcher.exits), launcher.given_up.done()) == (1, 1, False)
    finally:
        await launcher.stop(0.0, told=())


async def test_a_worker_that_the_system_cannot_start_is_given_up_with_the_reason() -> None:
    launcher, reason = await outcome(None)
    assert reason == "cannot be started: [Errno 24] Too many open files"
    assert (launcher.num_starts, launcher.exits) == (1 + RESTARTS_ALLOWED, [])


async def test_a_launcher_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no room for a report")

    monkeypatch.setattr(Scripted, "_exited", broken)
    _, reason = await outcome(EXIT_FAILED)
    assert reason == "its launcher failed: RuntimeError('no room for a report')"


async def test_a_retired_worker_ends_and_its_name_is_free() -> None:
    launcher = Scripted(0, seconds=60.0)
    launcher.start([SPEC])
    try:
        async with asyncio.timeout(DEADLINE_S):
            await launcher.has_started.wait()
            launcher.assign(SPEC.worker_id, Role.PREFILL)
            launcher.retire(SPEC.worker_id)
            assert launcher.kept() == []
            assert launcher.take_place() == replace(SPEC, role=Role.PREFILL)
            launcher.retire(SPEC.worker_id)
            assert launcher.take_place() is None
            await asyncio.gather(*(running.task for running in launcher._running.values() if running.task))
        assert (launcher.num_starts, launcher.exits) == (1, ["killed by SIGTERM"])
        assert launcher.names() == frozenset()
        assert not launcher.given_up.done()
    finally:
        await launcher.stop(0.0, told=())


@pytest.mark.parametrize(
    ("num_workers", "cores", "runs"),
    [
        (2, [0, 1, 2, 3, 4], [(0, 1, 2), (3, 4)]),
        (2, [4, 7], [(4,), (7,)]),
        (3, [0, 1], [(), (), ()]),
    ],
)
def test_cores_are_shared_out_without_overlap_or_not_at_all(
    num_workers: int, cores: list[int], runs: list[tuple[int, ...]]
) -> None:
    assert share_cores(num_workers, cores) == runs
