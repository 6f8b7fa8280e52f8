"""UCX's own benchmark, `ucx_perftest`, which comes with UCX: what it moves without us, in pieces of our size.

Left alone it sends the same message's memory over and over, which stays in the second cache: no KV pool does. So each
of its messages here is a list of as many pieces as the last-level cache has room for, one after the other; source and
target together are twice that. What it reaches is the rate of memory, with the cost of each piece.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinpool.bench.engine.ceilings import last_level_cache_bytes
from twinpool.errors import TransferError

_LIMIT_S = 20.0
_MESSAGES = 2
_WARM_UP_MESSAGES = 1
_MEGABYTE = 1 << 20
_LEAST_BYTES, _MOST_BYTES = 128 << 20, 512 << 20


@dataclass(frozen=True, slots=True)
class Perftest:
    """The program, where its libraries are, the size of a piece, and the core of the other end (None: any)."""

    program: str
    libraries: str
    message_bytes: int
    core: int | None

    @classmethod
    def find(cls, message_bytes: int, core: int | None) -> Perftest | None:
        """The one of the installed UCX package, or on the PATH; None if there is none."""
        spec = importlib.util.find_spec("libucx")
        locations = (spec.submodule_search_locations or ()) if spec is not None else ()
        for folder in map(Path, locations):
            if (program := shutil.which(folder / "bin" / "ucx_perftest")) is not None:
                return cls(program, str(folder / "lib"), message_bytes, core)
        found = shutil.which("ucx_perftest")
        return None if found is None else cls(found, "", message_bytes, core)

    def seconds(self, num_bytes: int) -> float:
        """What so many bytes, in no cache, take from one process of this host to another, at the rate of a whole run.

        Raises:
            TransferError: it fails, or prints something else than it should.
        """
        port = str(_free_port())
        wanted_bytes = min(max(_LEAST_BYTES, last_level_cache_bytes()), _MOST_BYTES)
        pieces = f"{self.message_bytes}:{max(1, wanted_bytes // self.message_bytes)}"
        other_core = () if self.core is None else ("-c", str(self.core))
        with self._run("-p", port, *other_core) as server:
            deadline = time.monotonic() + _LIMIT_S
            while True:
                counts = ("-n", str(_MESSAGES), "-w", str(_WARM_UP_MESSAGES))
                sizes = ("-s", pieces, "-i", str(self.message_bytes))
                with self._run("127.0.0.1", "-p", port, "-t", "tag_bw", *sizes, *counts, "-fv") as client:
                    said = _all_that_it_says(client)
                if client.returncode == 0:
                    return num_bytes / _bytes_per_s(said)
                # The other end may not listen yet.
                if server.poll() is not None or time.monotonic() > deadline:
                    raise TransferError(f"ucx_perftest fails: {said.strip()[-200:]}")

    @contextlib.contextmanager
    def _run(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        environment = {**os.environ, "UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"}
        if self.libraries:
            environment["LD_LIBRARY_PATH"] = self.libraries
        process = subprocess.Popen(
            [self.program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _all_that_it_says(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=_LIMIT_S)[0]
    except subprocess.TimeoutExpired as exc:
        raise TransferError(f"ucx_perftest does not end within {_LIMIT_S:g} s") from exc


def _bytes_per_s(said: str) -> float:
    """From the last line: iterations, three latencies, then bandwidth (average, overall) in MiB per second."""
    try:
        return float(said.strip().splitlines()[-1].split(",")[5]) * _MEGABYTE
    except (IndexError, ValueError) as exc:
        raise TransferError(f"ucx_perftest said something else than a rate: {said[-200:]!r}") from exc


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
