"""One worker's engine in a process of its own, which runs the steps that it is told: `python -m
twinpool.planner.profile.worker_end SETTINGS`.

Reads one JSON command a line from standard input and answers each with one JSON line; ends when the input does. A step
that it loops goes on until the next command.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from twinpool.bench.engine.machine import describe
from twinpool.bench.engine.model_bed import ModelBed
from twinpool.engine.host_memory import host_memory
from twinpool.engine.model_runner import Allocate
from twinpool.errors import TwinpoolError
from twinpool.kv_transfer.connector import LocalEnd
from twinpool.kv_transfer.shm_pool import SharedPool
from twinpool.planner.profile.engine_messages import (
    Answer,
    Command,
    Done,
    Facts,
    Failed,
    Loop,
    Ran,
    Run,
    Stop,
    WorkerSettings,
)


def main(arguments: Sequence[str]) -> None:
    """Loads the model, says what it is, and follows commands."""
    settings = msgspec.json.decode(arguments[0], type=WorkerSettings)
    if settings.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)
    torch.set_num_threads(settings.threads)
    with _pool(settings) as allocate:
        try:
            bed = ModelBed(
                Path(settings.directory), settings.dtype, settings.device, settings.threads,
                settings.pool_tokens, settings.most_decodes, allocate, settings.weights,
            )  # fmt: skip
        except TwinpoolError as exc:
            _say(Failed(str(exc)))
            return
        runner = bed.runner
        layout = runner.layout
        machine = describe(runner.device)
        _say(Facts(runner.dtype.value, layout.block_size, layout.token_bytes, runner.max_model_len, machine))
        _follow(bed)


@contextlib.contextmanager
def _pool(settings: WorkerSettings) -> Iterator[Allocate]:
    pools: list[SharedPool] = []

    def shared(num_bytes: int) -> memoryview:
        pools.append(SharedPool(num_bytes, LocalEnd("profile-worker", uuid.uuid4().hex[:12], "profile")))
        return pools[0].memory

    try:
        yield shared if settings.is_pool_shared else host_memory
    finally:
        for pool in pools:
            pool.close()


def _follow(bed: ModelBed) -> None:
    lines: deque[bytes | None] = deque()
    has_line = threading.Semaphore(0)

    def listen() -> None:
        while line := sys.stdin.buffer.readline():
            lines.append(line)
            has_line.release()
        lines.append(None)
        has_line.release()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        has_line.acquire()
        if (line := lines.popleft()) is None:
            return
        match msgspec.json.decode(line, type=Command):
            case Run(pieces, times):
                batch = bed.step(pieces)
                _say(Ran(tuple(bed.runner.run(batch).seconds for _ in range(times))))
            case Loop(pieces):
                batch = bed.step(pieces)
                _say(Done())
                while not lines:
                    bed.runner.run(batch)
            case Stop():
                _say(Done())


def _say(answer: Answer) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
