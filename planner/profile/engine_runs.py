"""Measures steps on workers' engines, each in a process of its own on the cores that a server would give it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import psutil

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
FARTHEST = 2.5
"""Times its median: a repetition that took longer tells of something else."""
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

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used; 0 if it has ended."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

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


class Sampler:
    """Runs the cases of a plan in turns, for as long as it is told, and keeps all durations: what the machine does
    meanwhile touches all of them alike, and measuring can go on later.

    `engine_of` gives each case's engine, `other_than` the one beside it (None: there is no second one, and busy cases
    are left out).
    """

    def __init__(
        self,
        plan: StepPlan,
        engine_of: Callable[[Case], Engine],
        other_than: Callable[[Engine], Engine] | None,
    ) -> None:
        self._plan = plan
        self._engine_of = engine_of
        self._other_than = other_than
        self._seconds: dict[tuple[Case, int], list[float]] = {(case, 0): [] for case in plan.alone}
        if other_than is not None:
            self._seconds |= {(case, 1): [] for case in plan.busy}
        self._before: dict[Case, list[float]] = {case: [] for case in plan.busy}
        self._order = list(self._seconds)
        random.Random(0).shuffle(self._order)  # so that even a short while has steps of all kinds
        self._turn = 0

    @property
    def num_rounds(self) -> float:
        """How often all cases had their turn."""
        return self._turn / len(self._order)

    def go_on(self, seconds: float, least_rounds: int = 0, say: Say = lambda _: None) -> list[StepSample]:
        """Goes on where it was, for about so long, and until there were so many rounds. Gives what it found meanwhile.
        Raises ModelError."""
        cases = self._order
        found: list[StepSample] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until or self._turn < least_rounds * len(cases):
            place = self._turn % len(cases)
            if not place:
                say(f"steps of the engine: {len(cases)} shapes, round {self._turn // len(cases) + 1}")
            case, num_busy = cases[place]
            taken = self._run(case, num_busy)
            self._seconds[case, num_busy] += taken
            found.append(_sample(case, num_busy, taken, ()))
            self._turn += 1
        return found

    def samples(self) -> list[StepSample]:
        """What was found so far, of cases that had a turn."""
        return [
            _sample(case, num_busy, each, self._before[case] if num_busy else ())
            for (case, num_busy), each in self._seconds.items()
            if each
        ]

    def _run(self, case: Case, num_busy: int) -> list[float]:
        engine, before = self._engine_of(case), self._seconds[case, num_busy]
        times = 1 if before and before[0] > SHORT_S else 1 + BURST
        if not num_busy or self._other_than is None:
            return engine.seconds(case.pieces, times)[-BURST:]
        self._before[case] += engine.seconds(case.pieces, times)[-BURST:]
        with self._other_than(engine).looping(self._plan.beside(case).pieces):
            return engine.seconds(case.pieces, times)[-BURST:]


def _sample(case: Case, num_busy: int, seconds: Sequence[float], before: Sequence[float]) -> StepSample:
    return StepSample(
        part=case.part.value,
        name=case.name,
        shape=tuple(case.shape),
        num_busy=num_busy,
        seconds=statistics.fmean(_within_reason(seconds)),
        spread=spread(seconds),
        num_runs=len(seconds),
        each_s=tuple(seconds),
        alone_s=statistics.fmean(_within_reason(before)) if before else None,
        is_held_out=case.is_held_out,
    )


def _within_reason(seconds: Sequence[float]) -> list[float]:
    """Without those that are so far from the middle that something else has interrupted them."""
    middle = statistics.median(seconds)
    return [each for each in seconds if each <= FARTHEST * middle]


def _listed(pieces: Sequence[Piece]) -> list[tuple[int, int, bool]]:
    return [(piece.start, piece.count, piece.is_sampled) for piece in pieces]
