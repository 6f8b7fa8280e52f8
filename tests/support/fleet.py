"""Servers that the cases share: a tiny model behind real processes, one deployment per transport."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.server import Server, serving, wait_for
from support.visitors import Visit, Visitor, ask
from twinpool.config import TransportName
from twinpool.kv_transfer import transports

TRANSPORTS = ("shm", "tcp", "ucx")
NUM_BLOCKS = 128
BLOCK_SIZE = 8
NUM_SLOTS = 8
SETTINGS = (
    "--dtype=float32", f"--block-size={BLOCK_SIZE}", f"--num-blocks={NUM_BLOCKS}", "--max-model-len=1024",
    "--token-budget=16", f"--max-num-seqs={NUM_SLOTS}", "--headroom-tokens=16", "--transfer-timeout=3",
    "--threads=1", "--no-pin", "--strict", "--drain=1",
)  # fmt: skip
LATE = "--faults=late=0.01"
"""Every push waits this long, one after the other: a transfer takes long enough to leave in it, and to die."""
FREEZE_TRIES = 10
SETTLED_S = 0.3
CANARY: dict[str, list[int]] = {}
BROKEN = "--faults=late=0.005,corrupt=0.15,drop=0.05,seed=3"


class Fleet:
    """The servers of a session, by their arguments."""

    def __init__(self, logs: Path, model: Path) -> None:
        self.model = model
        self._logs = logs
        self._stack = ExitStack()
        self._servers: dict[tuple[str, ...], Server] = {}

    def server(self, *arguments: str) -> Server:
        """The one with these arguments, ready and with every worker in place."""
        if arguments not in self._servers:
            command = (str(self.model), "--served-model-name=tiny", *SETTINGS, *arguments)
            self._servers[arguments] = self._stack.enter_context(
                serving(self._logs, *command, environment={"PYTHONHASHSEED": "random"})
            )
        server = self._servers[arguments]
        wait_for("every worker has joined", lambda: is_whole(server, arguments), 60)
        return server

    def close(self) -> None:
        """Stops them all, at the same time."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.stop, self._servers.values()))
        self._stack.close()


def is_whole(server: Server, arguments: tuple[str, ...]) -> bool:
    """Whether all the workers that were asked for have joined, were heard of, and are linked."""
    wanted = {key: int(value) for key, _, value in (a.partition("=") for a in arguments) if value.isdecimal()}
    prefill, decode = wanted.get("--prefill", 0), wanted.get("--decode", 0)
    return (
        num_workers(server) == prefill + decode + wanted.get("--colocated", 0)
        and num_blocks(server) == NUM_BLOCKS * num_workers(server)
        and server.get("/metrics").text.count("\ntwinpool_link_gb_per_s{") == prefill * decode
    )


def require(name: str) -> None:
    """Skips the test where a transport cannot run."""
    if (reason := transports.available()[TransportName(name)]) is not None:
        pytest.skip(f"{name} is not usable here: {reason}")


def split_server(fleet: Fleet, transport: str) -> Server:
    """Two prefill workers and one decode worker over a slow link."""
    require(transport)
    return fleet.server("--prefill=2", "--decode=1", f"--transport={transport}", LATE)


def broken_server(fleet: Fleet, transport: str) -> Server:
    """Two pools over a link that flips bytes and loses pushes, and enough attempts to get through in the end."""
    require(transport)
    return fleet.server("--prefill=1", "--decode=1", f"--transport={transport}", BROKEN, "--max-attempts=60")


def num_workers(server: Server) -> int:
    """Workers that have joined."""
    return int(server.metric("twinpool_workers"))


def num_blocks(server: Server) -> int:
    """The blocks of the workers that were heard of, whatever their state; leased ones are owned, too."""
    counted = re.findall(r'\ntwinpool_kv_blocks\{.*state="(\w+)".*\} (\S+)', server.get("/metrics").text)
    return sum(int(float(count)) for state, count in counted if state != "leased")


def num_busy(server: Server) -> float:
    """Sequences that run or wait on workers."""
    return sum(server.metric(f"twinpool_worker_sequences_{what}") for what in ("running", "waiting"))


def is_colocated(server: Server) -> bool:
    """Whether its workers do both."""
    return server.metric("twinpool_workers", role="colocated") > 0


def num_live(server: Server) -> int:
    """Requests that have not reached their end."""
    samples = [
        line
        for line in server.get("/metrics").text.splitlines()
        if line.startswith("twinpool_requests_live{")
    ]
    return sum(int(float(line.rpartition(" ")[2])) for line in samples)


def assert_returned(server: Server, limit_s: float = 15.0) -> None:
    """Waits until nothing is held anywhere: no live request, no attempt on a worker, no block."""
    wait_for("no request lives", lambda: num_live(server) == 0, limit_s)
    wait_for(
        "no worker holds an attempt", lambda: server.metric("twinpool_worker_attempts_held") == 0, limit_s
    )
    wait_for(
        "every worker was heard of", lambda: num_blocks(server) == NUM_BLOCKS * num_workers(server), limit_s
    )
    server.wait_until_empty(limit_s)
    for never in ("duplicate_tokens", "protocol_faults", "decode_pool_prompt_tokens", "invariant_violations"):
        assert server.metric(f"twinpool_{never}_total") == 0, never


def assert_canary(server: Server) -> None:
    """One prompt has one answer, whatever happened before it, on every server of this model."""
    answer = ask(server, prompt="The canary sings", max_tokens=12, ignore_eos=True)
    assert answer.token_ids == CANARY.setdefault("tokens", answer.token_ids)
    assert len(answer.token_ids) == 12


@contextmanager
def frozen(server: Server, worker_id: str) -> Iterator[None]:
    """The worker stands still in the block, alive and silent."""
    pid = server.worker_pids()[worker_id]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was frozen for longer than its lease
            os.kill(pid, signal.SIGCONT)


def _stays(visitor: Visitor, states: tuple[str, ...]) -> bool:
    """Whether it is still in one of `states` when what was on its way to the coordinator has come."""
    until = time.monotonic() + SETTLED_S
    while (is_there := visitor.states()[-1] in states) and time.monotonic() < until:
        pass
    return is_there


@contextmanager
def frozen_in_transfer(server: Server, visit: Visit, **fields: Any) -> Iterator[Visitor]:
    """A visitor whose prefill worker stands still in the block, having pushed a part of its blocks, as a rule."""
    for _ in range(FREEZE_TRIES):
        victim = visit(server, cache_salt=uuid.uuid4().hex, **fields)
        victim.wait_until("prefilling")
        with frozen(server, victim.timeline()["attempts"][-1]["prefill_worker"]):
            if _stays(victim, ("prefilling", "transferring")):
                yield victim
                return
        victim.leave()
    raise AssertionError("the transfer was over each time; make it longer")
