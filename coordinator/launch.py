"""Starting worker processes on this host, watching them, and leaving none behind.

Each worker inherits the read end of a pipe, its *lifeline*, whose write end only this process holds: however this
process dies, the pipe closes and the worker exits. Workers run in their own process group, so that Ctrl-C reaches the
coordinator alone, which drains before it stops them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from twinpool.config import Role
from twinpool.worker.process import EXIT_CONFIG

RESTARTS_ALLOWED = 5
RESTART_WINDOW_S = 120.0
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
RETIRED_WITHIN_S = 10.0
"""A process that is to end for good is killed when it is still there after so long."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to run: its name, its role, its cores (empty: not pinned), and further command line arguments."""

    worker_id: str
    role: Role
    cores: tuple[int, ...]
    threads: int
    arguments: tuple[str, ...]


def share_cores(num_workers: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits `cores` into `num_workers` disjoint runs of nearly equal length, in order.

    With fewer cores than workers nobody is pinned (all tuples are empty): the operating system shares better then.

    >>> share_cores(2, [0, 1, 2, 3, 4])
    [(0, 1, 2), (3, 4)]
    >>> share_cores(3, [0, 1])
    [(), (), ()]
    """
    if len(cores) < num_workers:
        return [()] * num_workers
    share, extra = divmod(len(cores), num_workers)
    runs, start = [], 0
    for i in range(num_workers):
        stop = start + share + (1 if i < extra else 0)
        runs.append(tuple(cores[start:stop]))
        start = stop
    return runs


def usable_cores() -> list[int]:
    """The CPU cores that this process may run on, or all of them where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass(slots=True)
class _Running:
    spec: WorkerSpec
    process: asyncio.subprocess.Process | None = None
    is_retired: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Failure:
    role: Role
    reason: str
    at: float


class Launcher:
    """Runs the workers of one coordinator.

    `on_exit(worker_id, pid, reason)` is called at each end of a process. A worker that dies is started again with a
    growing pause, at most `RESTARTS_ALLOWED` times in `RESTART_WINDOW_S`; one that exits with `EXIT_CONFIG` is not.
    A start that the system refuses (no memory, no file descriptor) counts like one that died.
    `secrets` are environment variables that workers get in addition: their command lines can be read by everybody.
    `on_given_up(spec, reason)` is called when it will not be started again.
    """

    def __init__(
        self,
        endpoint: str,
        on_exit: Callable[[str, int, str], None],
        on_given_up: Callable[[WorkerSpec, str], None],
        secrets: Mapping[str, str],
    ) -> None:
        self._endpoint = endpoint
        self._on_exit = on_exit
        self._on_given_up = on_given_up
        self._secrets = secrets
        self._running: dict[str, _Running] = {}
        self._failures: dict[str, _Failure] = {}
        self._places: list[WorkerSpec] = []
        self._stopping = asyncio.Event()
        self._lifeline_read, self._lifeline_write = os.pipe()

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts one process per spec and keeps it running until `stop`. Who has failed to be of that role, or had that
        name, is forgotten: this is the next attempt."""
        names, roles = {spec.worker_id for spec in specs}, {spec.role for spec in specs}
        self._failures = {
            name: failure
            for name, failure in self._failures.items()
            if not (name in names or failure.role in roles)
        }
        for spec in specs:
            running = _Running(spec)
            self._running[spec.worker_id] = running
            running.task = asyncio.create_task(self._keep_running(running), name=f"launch {spec.worker_id}")
            running.task.add_done_callback(partial(self._ended, running))

    def keep_pool_size(self, worker_id: str, num_blocks: int) -> None:
        """Further processes of that worker get a KV pool of `num_blocks`. Left to themselves they would size it by what
        is free now, beside the pools of the others: smaller at every start, and too small for requests that fitted.
        """
        running = self._running[worker_id]
        if not any(argument.startswith("--num-blocks=") for argument in running.spec.arguments):
            arguments = (*running.spec.arguments, f"--num-blocks={num_blocks}")
            running.spec = replace(running.spec, arguments=arguments)

    def kept(self) -> list[WorkerSpec]:
        """The workers that run, or will be started again."""
        return [r.spec for r in self._running.values() if not r.is_retired]

    def keeps(self, role: Role) -> bool:
        """Whether there is one of this role among them."""
        return any(spec.role is role for spec in self.kept())

    def failed(self, within_s: float) -> dict[str, str]:
        """The workers that were given up less than `within_s` ago, and why."""
        now = asyncio.get_running_loop().time()
        return {name: each.reason for name, each in self._failures.items() if now - each.at < within_s}

    def names(self) -> frozenset[str]:
        """The ids of all workers whose process may still run."""
        return frozenset(self._running)

    def assign(self, worker_id: str, role: Role) -> None:
        """Further processes of that worker have this role."""
        if (running := self._running.get(worker_id)) is not None:
            running.spec = replace(running.spec, role=role)

    def take_place(self) -> WorkerSpec | None:
        """How a worker was run that has gone for good: another one gets its cores and its device. None: each such place
        is taken."""
        return self._places.pop() if self._places else None

    def retire(self, worker_id: str) -> None:
        """That worker, if it is one of these, is not started again, and its process is to end."""
        running = self._running.get(worker_id)
        if running is None or running.is_retired:
            return
        running.is_retired = True
        self._places.append(running.spec)
        if running.process is not None and running.process.returncode is None:
            running.process.terminate()
            asyncio.get_running_loop().call_later(RETIRED_WITHIN_S, self.kill, worker_id, running.process.pid)

    def _ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        """If `task` has failed, nobody starts that worker again, which must not go unnoticed. A retired one's name is
        free."""
        if running.is_retired:
            del self._running[running.spec.worker_id]
            return
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._give_up(running, f"its launcher failed: {exc!r}")

    def _give_up(self, running: _Running, reason: str) -> None:
        spec = running.spec
        del self._running[spec.worker_id]
        self._failures[spec.worker_id] = _Failure(spec.role, reason, asyncio.get_running_loop().time())
        self._places.append(spec)
        self._on_given_up(spec, reason)

    def kill(self, worker_id: str, pid: int) -> None:
        """Ends that process at once, whatever it does (frozen ones too), if this launcher started it and it runs."""
        running = self._running.get(worker_id)
        process = running.process if running else None
        if process is not None and process.pid == pid and process.returncode is None:
            process.kill()

    def start_no_more(self) -> None:
        """From now on a worker that ends is not started again: the server is about to stop."""
        self._stopping.set()

    async def stop(self, grace_s: float, told: Collection[str]) -> None:
        """Waits `grace_s` for the workers that were told to end, then terminates, then kills what is left.

        A worker that is not in `told` was not reached by the coordinator, as it still loads: it is terminated at once.
        """
        self.start_no_more()
        for worker_id, running in self._running.items():
            process = running.process
            if worker_id not in told and process is not None and process.returncode is None:
                process.terminate()
        processes = [r.process for r in self._running.values() if r.process and r.process.returncode is None]
        for signal_number, patience_s in ((None, grace_s), (signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            alive = [p for p in processes if p.returncode is None]
            if not alive:
                break
            if signal_number is not None:
                for process in alive:
                    process.send_signal(signal_number)
            await asyncio.wait([asyncio.create_task(p.wait()) for p in alive], timeout=patience_s)
        tasks = [r.task for r in self._running.values() if r.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for fd in (self._lifeline_read, self._lifeline_write):
            os.close(fd)

    async def _keep_running(self, running: _Running) -> None:
        clock = asyncio.get_running_loop().time
        backoff_s = FIRST_BACKOFF_S
        starts: list[float] = []
        while not (self._stopping.is_set() or running.is_retired):
            starts.append(clock())
            status, reason = await self._run_once(running)
            starts = [t for t in starts if clock() - t < RESTART_WINDOW_S]
            if self._stopping.is_set() or running.is_retired:
                return
            if status == EXIT_CONFIG or len(starts) > RESTARTS_ALLOWED:
                self._give_up(running, reason)
                return
            backoff_s = FIRST_BACKOFF_S if len(starts) <= 1 else min(backoff_s * 2, LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _run_once(self, running: _Running) -> tuple[int | None, str]:
        """One process from its start to its end: its exit status (None: it could not be started), in words too."""
        try:
            process = running.process = await self._spawn(running.spec)
        except OSError as exc:
            return None, f"cannot be started: {exc}"
        if running.is_retired:  # while it was started
            process.terminate()
        status = await process.wait()
        reason = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        self._on_exit(running.spec.worker_id, process.pid, reason)
        return status, reason

    async def _spawn(self, spec: WorkerSpec) -> asyncio.subprocess.Process:
        command = [
            sys.executable, "-m", "twinpool", "worker",
            "--role", spec.role.value, "--id", spec.worker_id, "--connect", self._endpoint,
            "--lifeline-fd", str(self._lifeline_read), "--threads", str(spec.threads),
        ]  # fmt: skip
        if spec.cores:
            command += ["--cores", ",".join(map(str, spec.cores))]
        threads = str(spec.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **self._secrets}
        return await asyncio.create_subprocess_exec(
            *command,
            *spec.arguments,
            env=environment,
            pass_fds=(self._lifeline_read,),
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
        )
