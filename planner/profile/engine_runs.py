"""Measures steps on workers' engines, each in a process of its own on the cores that a server would give it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from twinpool.bench.engine.floors import Piece
from twinpool.errors import ModelError
from twinpool.planner.profile.cases import Case, StepPlan
from twinpool.planner.profile.saved import StepSample
from twinpool.planner.profile.spread import spread

LONGEST_LOAD_S = 900.0
"""Of a model that has to be read, and kernels that have to be compiled, first."""
LONGEST_ANSWER_S = 120.0
SHORT_S = 0.1
"""A step that is shorter runs `BURST` times in a row, after one that does not count: as its caches are in a server,
where steps of one kind follow each other."""
BURST = 2
LEAST_ROUNDS = 2
Say = Callable[[str], None]


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a process loads, and where. `cores` empty: not pinned. `is_pool_shared`: KV lies in shared memory, as on a
    decode worker whose links are `shm`."""

    directory: str
    dtype: str
    weights: str
    device: str
    threads: int
    cores: tuple[int, ...]
    pool_tokens: int
    most_decodes: int
    is_pool_shared: bool


class Facts(msgspec.Struct, frozen=True):
    """What a worker says of itself once it has loaded."""

    dtype: str
    block_size: int
    kv_token_bytes: int
    max_model_len: int
    machine: dict[str, Any]


class Engine:
    """One worker's engine. `name` is for errors."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process = process
        self._name = name
        self.facts: Facts

    def load(self) -> None:
        """Waits until it is ready. Raises ModelError: it could not load; its own words are in the message."""
        self.facts = msgspec.convert(self._heard(LONGEST_LOAD_S), Facts)

    def seconds(self, pieces: Sequence[Piece], times: int) -> list[float]:
        """Runs a step so many times in a row. Raises ModelError: it failed."""
        self._tell("run", {"pieces": _listed(pieces), "times": times})
        seconds: list[float] = self._heard(LONGEST_ANSWER_S * times)["seconds"]
        return seconds

    @contextlib.contextmanager
    def looping(self, pieces: Sequence[Piece]) -> Iterator[None]:
        """Runs a step again and again meanwhile. Raises ModelError."""
        self._tell("loop", {"pieces": _listed(pieces)})
        self._heard(LONGEST_ANSWER_S)
        try:
            yield
        finally:
            self._tell("stop", {})
            self._heard(LONGEST_ANSWER_S)

    def _tell(self, command: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "it was piped"
        try:
            self._process.stdin.write(json.dumps([command, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self._gone() from exc

    def _heard(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was piped"
        watch = threading.Timer(limit_s, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ModelError(answer["error"])
        return answer

    def _gone(self) -> ModelError:
        return ModelError(f"{self._name} ended with status {self._process.wait()}; its error is above")


@contextlib.contextmanager
def engine(settings: WorkerSettings, name: str) -> Iterator[Engine]:
    """A worker process, which ends with this context."""
    threads = str(settings.threads)
    process = subprocess.Popen(
        [sys.executable, "-m", "twinpool.planner.profile.worker_end", msgspec.json.encode(settings).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        start_new_session=True,  # Ctrl-C reaches only this process, which ends them
    )
    try:
        yield Engine(process, name)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


@dataclass(slots=True)
class Measured:
    """All durations of a case so far."""

    case: Case
    num_busy: int
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> StepSample:
        """What is kept."""
        return StepSample(
            part=self.case.part.value,
            name=self.case.name,
            shape=tuple(self.case.shape),
            num_busy=self.num_busy,
            seconds=statistics.median(self.seconds),
            spread=spread(self.seconds),
            num_runs=len(self.seconds),
            is_held_out=self.case.is_held_out,
        )


def measure_alone(plan: StepPlan, engine_of: Callable[[Case], Engine], say: Say) -> list[StepSample]:
    """Every case alone, in rounds: what the machine does meanwhile then touches all of them alike. `engine_of` gives
    each case's engine."""
    measured = [Measured(case, 0) for case in plan.alone]
    for number in _rounds(plan.rounds, plan.most_s):
        say(f"steps alone: {len(measured)} shapes, round {number + 1} of at most {plan.rounds}")
        for each in measured:
            each.seconds += _run(engine_of(each.case), each)
    return [each.sample() for each in measured]


def measure_busy(
    plan: StepPlan, engine_of: Callable[[Case], Engine], other_than: Callable[[Engine], Engine], say: Say
) -> list[StepSample]:
    """The busy cases beside a neighbour, in rounds."""
    measured = [Measured(case, 1) for case in plan.busy]
    for number in _rounds(plan.busy_rounds, plan.busy_most_s):
        say(
            f"steps beside a neighbour: {len(measured)} shapes, round {number + 1} of at most {plan.busy_rounds}"
        )
        for each in measured:
            mine = engine_of(each.case)
            with other_than(mine).looping(plan.beside(each.case).pieces):
                each.seconds += _run(mine, each)
    return [each.sample() for each in measured]


def _rounds(most: int, most_s: float) -> Iterator[int]:
    started = time.monotonic()
    for number in range(most):
        if number >= LEAST_ROUNDS and time.monotonic() - started > most_s:
            return
        yield number


def _run(engine: Engine, measured: Measured) -> list[float]:
    pieces, before = measured.case.pieces, measured.seconds
    if before and before[0] > SHORT_S:
        return engine.seconds(pieces, 1)
    _, *counted = engine.seconds(pieces, 1 + (BURST if before else 1))
    return counted


def _listed(pieces: Sequence[Piece]) -> list[tuple[int, int, bool]]:
    return [(piece.start, piece.count, piece.is_sampled) for piece in pieces]
