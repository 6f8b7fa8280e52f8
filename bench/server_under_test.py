"""A running server seen from outside: its HTTP port, its processes, its log. Started here, or found by its URL."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from twinpool.bench.client import Client
from twinpool.errors import TwinpoolError

START_LIMIT_S = 120.0
"""Of idleness: a server that loads or compiles has longer,"""
LONGEST_START_S = 900.0
"""but no longer than this."""
WORKING_SHARE = 0.2
"""Of one core: a server that used so much since it was last looked at is starting, not stuck."""
STOP_LIMIT_S = 45.0
POLL_S = 0.1
HEARTBEATS_S = 1.2
"""Workers report about every half second: what is empty for so long was empty in a report made meanwhile."""
BUSY = "busy, as a share of one core"
"""The figure of a report that has `busy_shares`."""
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_WORKER = re.compile(r"twinpool worker .*--id (\S+)")


class ServerFault(TwinpoolError):
    """The server did not start, is not there, or does not show what it should. The message says which."""


@dataclass(frozen=True, slots=True)
class Samples:
    """One reading of `/metrics`."""

    values: tuple[tuple[str, dict[str, str], float], ...]

    @classmethod
    def parse(cls, text: str) -> Samples:
        """Reads the Prometheus text format."""
        found = (_SAMPLE.fullmatch(line) for line in text.splitlines())
        return cls(tuple((m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in found if m))

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of `twinpool_NAME` whose labels include `labels`; 0 if there are none."""
        return sum(
            value
            for found, having, value in self.values
            if found == f"twinpool_{name}" and labels.items() <= having.items()
        )

    def held(self) -> dict[str, float]:
        """What is not at rest: live requests, queued ones, attempts on workers, KV blocks that are neither free nor
        cached. Empty when all is."""
        counts = {
            name: self.total(name) for name in ("requests_live", "queue_requests", "worker_attempts_held")
        }
        for state in ("owned", "quarantined", "leased"):
            counts[f"{state} blocks"] = self.total("kv_blocks", state=state)
        return {name: count for name, count in counts.items() if count}


@dataclass(slots=True)
class StartPatience:
    """How long a start is waited for: `limit_s` beyond the last sign of work, `LONGEST_START_S` in all."""

    limit_s: float
    began_at: float
    waited_s: float = 0.0
    _worked_at: float = field(init=False)
    _seen_at: float = field(init=False)
    _seen_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self._worked_at = self._seen_at = self.began_at

    def is_left(self, now: float, cpu_s: float) -> bool:
        """Whether to wait on, when the server's processes have used `cpu_s` of CPU since they began."""
        self.waited_s = now - self.began_at
        if now - self._seen_at >= 1.0:
            if cpu_s - self._seen_cpu_s >= WORKING_SHARE * (now - self._seen_at):
                self._worked_at = now
            self._seen_at, self._seen_cpu_s = now, cpu_s
        return now - self._worked_at < self.limit_s and self.waited_s < max(self.limit_s, LONGEST_START_S)


@dataclass(slots=True)
class ServerUnderTest:
    """One server. `process` is None when it was found, not started; then it is not stopped either. Its log, at
    `log_path`, is the caller's to keep or to delete. `ready_s` is how long it took to be ready, if it was started here
    and is."""

    url: str
    pid: int
    client: Client
    process: subprocess.Popen[bytes] | None = None
    log_path: Path | None = None
    ready_s: float | None = None
    _started_at: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, arguments: Sequence[str], log_path: Path | None = None) -> ServerUnderTest:
        """Starts `twinpool serve ARGUMENTS` on a free port, as the leader of a process group, so that Ctrl-C reaches
        only the caller, who must `stop` it. It is not ready yet. Its log is written to `log_path`, or to a temporary
        file. Raises ServerFault if `log_path` cannot be written."""
        port = _free_port()
        if log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="twinpool-bench-", suffix=".log")
            os.close(descriptor)
            log_path = Path(name)
        try:
            log = log_path.open("wb")
        except OSError as exc:
            raise ServerFault(f"--log {log_path} cannot be written: {exc.strerror}") from exc
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "twinpool", "serve", *arguments, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        url = f"http://127.0.0.1:{port}"
        return cls(url, process.pid, Client(url), process, log_path)

    @classmethod
    def attach(cls, url: str, api_key: str | None = None) -> ServerUnderTest:
        """The server that listens at `url` on this machine. Raises ServerFault if no process of this user does."""
        client = Client(url, api_key)
        for process in psutil.process_iter():
            try:
                connections = process.net_connections("tcp")
            except psutil.Error:
                continue
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == client.port for c in connections):
                return cls(url, process.pid, client)
        raise ServerFault(f"no process of yours listens on port {client.port}, of {urlsplit(url).netloc}")

    async def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Returns once `/ready` says yes. Time in which one that was started here works (say, compiles kernels) does
        not count. Raises ServerFault: the server ended, or is not ready in time."""
        reason = "it does not answer"
        patience = StartPatience(limit_s, time.monotonic())
        while patience.is_left(time.monotonic(), self._start_cpu_s()):
            if self.process is not None and self.process.poll() is not None:
                raise ServerFault(
                    f"the server ended with status {self.process.returncode}; its last words:\n{self.log_tail()}"
                )
            try:
                answer = await self.client.get("/ready")
            except (OSError, TimeoutError):
                await asyncio.sleep(POLL_S)
                continue
            if answer.status == 200:
                self.ready_s = None if self.process is None else time.monotonic() - self._started_at
                return
            reason = answer.body.decode(errors="replace")
            await asyncio.sleep(POLL_S)
        raise ServerFault(
            f"the server was not ready within {patience.waited_s:.0f} s: {reason}\n{self.log_tail()}"
        )

    def _start_cpu_s(self) -> float:
        """What its processes have used so far, if it was started here and runs."""
        if self.process is None or self.process.poll() is not None:
            return 0.0
        return sum(self.cpu_s().values())

    async def samples(self) -> Samples:
        """Reads `/metrics`. Raises ServerFault if it does not answer."""
        try:
            answer = await self.client.get("/metrics")
        except (OSError, TimeoutError) as exc:
            raise ServerFault(f"/metrics does not answer: {exc or 'no answer in time'}") from exc
        return Samples.parse(answer.body.decode())

    async def num_attempts(self, request_id: str) -> int:
        """How often a running or recent request was started, by its timeline. Raises ServerFault if there is none."""
        path = f"/v1/requests/{request_id}/timeline"
        try:
            answer = await self.client.get(path)
        except (OSError, TimeoutError) as exc:
            raise ServerFault(f"{path} does not answer: {exc or 'no answer in time'}") from exc
        if answer.status != 200:
            raise ServerFault(f"{path} answers {answer.status}: {answer.body.decode(errors='replace')}")
        return len(json.loads(answer.body)["attempts"])

    async def wait_until_rest(self, limit_s: float) -> tuple[float, dict[str, float]]:
        """Waits until nothing is held any more, in what workers say too.

        Returns the seconds until then and what is held still: nothing, unless `limit_s` has passed.
        """
        started = rest_since = time.monotonic()
        while True:
            held = (await self.samples()).held()
            now = time.monotonic()
            if held:
                rest_since = now
            if now - rest_since >= HEARTBEATS_S or (held and now - started > limit_s):
                return rest_since - started, held
            await asyncio.sleep(POLL_S)

    def workers(self) -> dict[str, int]:
        """Process ids of the workers that the server has started, by worker id."""
        pids: dict[str, int] = {}
        try:
            for child in psutil.Process(self.pid).children():
                if match := _WORKER.search(_title(child)):
                    pids[match[1]] = child.pid
        except psutil.NoSuchProcess as exc:
            raise ServerFault(f"the server's process {self.pid} is gone\n{self.log_tail()}") from exc
        return pids

    def memory_bytes(self) -> dict[str, int]:
        """What each process has for itself (USS), by worker id; the coordinator is "coordinator"."""
        sizes: dict[str, int] = {}
        for name, pid in ({"coordinator": self.pid} | self.workers()).items():
            try:
                sizes[name] = psutil.Process(pid).memory_full_info().uss
            except psutil.NoSuchProcess:
                continue
        return sizes

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU that each process has used so far, by worker id; the coordinator is "coordinator"."""
        used: dict[str, float] = {}
        for name, pid in ({"coordinator": self.pid} | self.workers()).items():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            used[name] = times.user + times.system
        return used

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of the server's log, if it was started here."""
        if self.log_path is None:
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    async def stop(self) -> None:
        """SIGTERM and, when that does not end it in time or the caller is cancelled, SIGKILL to its process group.

        Only if it was started here.
        """
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self.process.wait, STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._kill()
        except asyncio.CancelledError:
            self._kill()
            raise

    def _kill(self) -> None:
        assert self.process is not None, "it was started here"
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def busy_shares(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What each process used of one core between two readings of `cpu_s`, so many seconds apart."""
    return {name: (cpu_s - before.get(name, 0.0)) / seconds for name, cpu_s in after.items()}


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
