"""A real `twinpool serve` in its own process, for tests that talk to it over HTTP."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_LIMIT_S = 150.0
"""The first start of a checkout compiles, which takes more than a minute beside other tests."""
STOP_LIMIT_S = 40.0
POLL_S = 0.02


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(what: str, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Returns once `condition()` is true; fails the test when it is not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(POLL_S)


@dataclass
class Server:
    """A server that runs; `log` is what it wrote so far."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request of this class: an API key, where the server wants one."""

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # No certificates are loaded for plain HTTP: that would take 30 ms, each time.

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=10.0, verify=False)

    def post(self, path: str, body: dict[str, object], timeout_s: float = 120.0) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=self.headers, timeout=timeout_s, verify=False)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of `name` whose labels include `labels`."""
        total, seen = 0.0, False
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(r"([a-z0-9_]+)(?:\{(.*)\})? (\S+)", line)
            if match is None or match[1] != name:
                continue
            found = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if labels.items() <= found.items():
                total, seen = total + float(match[3]), True
        assert seen, f"/metrics has no {name} with {labels}"
        return total

    def worker_pids(self) -> dict[str, int]:
        """Process ids of the workers by worker id, from the process list: their titles show role and id."""
        pids: dict[str, int] = {}
        for pid in _children(self.process.pid):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if match := re.search(r"twinpool worker .*--id (\S+)", title):
                pids[match[1]] = pid
        return pids

    def wait_until_empty(self, limit_s: float = 15.0) -> None:
        """Waits until every block of every worker is free or cached: the ledger balances."""
        held = ("owned", "quarantined", "leased")
        wait_for(
            "all KV blocks free or cached",
            lambda: all(self.metric("twinpool_kv_blocks", state=state) == 0 for state in held),
            limit_s,
        )
        assert self.metric("twinpool_invariant_violations_total") == 0

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop within {STOP_LIMIT_S} s:\n{self.log}") from None


def _children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listing.split()]


@contextmanager
def serving(log_dir: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """Runs `twinpool serve ARGUMENTS` on a free port until the block ends; yields when it is ready."""
    port = free_port()
    log_path = log_dir / f"serve-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "twinpool", "serve", *arguments, "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=server_environment() | (environment or {}),
        )
    server = Server(process, f"http://127.0.0.1:{port}", log_path)
    try:
        wait_for("the server is ready", lambda: _is_ready(server), START_LIMIT_S)
        yield server
    finally:
        server.stop()


def _is_ready(server: Server) -> bool:
    assert server.process.poll() is None, f"the server ended early:\n{server.log}"
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def server_environment() -> dict[str, str]:
    """The environment of a server under test: this checkout's sources, no network."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": source}


def token_ids(choice: dict[str, object]) -> Sequence[int]:
    """The output token ids of a choice that was asked for with `return_token_ids`."""
    ids = choice["token_ids"]
    assert isinstance(ids, list)
    return ids
