"""Measures steps on workers' engines, each in a process of its own on the cores that a server would give it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import psutil

from twinpool.bench.engine.floors import Piece
from twinpool.errors import ModelError
from twinpool.planner.profile.cases import Part, StepCase, StepPlan
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
from twinpool.planner.profile.saved import StepSample
from twinpool.planner.profile.spread import spread
from twinpool.planner.profile.usual import usual_s

LONGEST_LOAD_S = 900.0
"""Of a model that has to be read, and kernels that have to be compiled, first."""
LONGEST_ANSWER_S = 120.0
SHORT_S = 0.1
"""A step that is shorter runs `BURST` times in a row, after one that does not count: as its caches are in a server,
where steps of one kind follow each other."""
BURST = 2
WARM_S = 0.3
"""For so long steps of decode run that do not count, where something else ran before: a server's decode worker runs one
after the other, and it takes some ten of them until its weights are in the caches as far as they can be. A colocated
worker has prompts among them all the time: its steps count as they come."""
GROUP = 6
"""Of a decode worker's cases so many follow each other, so that most need no warming."""
SLEEP_S = 0.12
"""Without anything to do: what a worker under a light load has between two prompts."""
FARTHEST = 2.5
"""Times its median: a repetition that took longer tells of something else."""
Say = Callable[[str], None]
A = TypeVar("A", Facts, Ran, Done)


class Engine:
    """One worker's engine. `name` is for errors."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name
        self.facts: Facts

    def load(self) -> None:
        """Waits until it is ready. Raises ModelError: it could not load; its own words are in the message."""
        self.facts = self._heard(Facts, LONGEST_LOAD_S)

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used; 0 if it has ended."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def seconds(self, pieces: Sequence[Piece], times: int) -> tuple[float, ...]:
        """Runs a step so many times in a row. Raises ModelError: it failed."""
        self._tell(Run(tuple(pieces), times))
        return self._heard(Ran, LONGEST_ANSWER_S * times).seconds

    @contextlib.contextmanager
    def looping(self, pieces: Sequence[Piece]) -> Iterator[None]:
        """Runs a step again and again meanwhile. Raises ModelError."""
        self._tell(Loop(tuple(pieces)))
        self._heard(Done, LONGEST_ANSWER_S)
        try:
            yield
        finally:
            self._tell(Stop())
            self._heard(Done, LONGEST_ANSWER_S)

    def _tell(self, command: Command) -> None:
        assert self._process.stdin is not None, "it was piped"
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self._gone() from exc

    def _heard(self, wanted: type[A], limit_s: float) -> A:
        assert self._process.stdout is not None, "it was piped"
        is_late = threading.Event()

        def end_late() -> None:
            is_late.set()
            self._process.kill()

        watch = threading.Timer(limit_s, end_late)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line and is_late.is_set():
            raise ModelError(
                f"{self._name} did not answer for {limit_s:.0f} s and was ended: end what else uses its cores, or "
                "profile a smaller model"
            )
        if not line:
            raise self._gone()
        answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Failed):
            raise ModelError(answer.error)
        assert isinstance(answer, wanted), f"{answer} is no {wanted.__name__}"
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
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        start_new_session=True,  # Ctrl-C reaches only this process, which ends them
    )
    try:
        yield Engine(process, name)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


class Kind(NamedTuple):
    """What is measured of a case: it beside so many busy workers, and whether the worker has slept before."""

    case: StepCase
    num_busy: int = 0
    has_slept: bool = False


class Sampler:
    """Runs the cases of a plan in turns, for as long as it is told, and keeps all durations: what the machine does
    meanwhile touches all of them alike, and measuring can go on later. Each round has an order of its own, so no cases
    share their luck for long.

    `engine_of` gives each case's engine, `other_than` the one beside it (None: there is no second one, busy cases are
    left out, and decode has no worker of its own).
    """

    def __init__(
        self,
        plan: StepPlan,
        engine_of: Callable[[StepCase], Engine],
        other_than: Callable[[Engine], Engine] | None,
    ) -> None:
        self._plan = plan
        self._engine_of = engine_of
        self._other_than = other_than
        kinds = [Kind(case) for case in plan.alone] + [Kind(case, has_slept=True) for case in plan.sleeping]
        if other_than is not None:
            kinds += [Kind(case, 1) for case in plan.busy] + [Kind(case, 1, True) for case in plan.sleeping]
        self._kinds = kinds
        self._order: list[Kind] = []
        """Of the round under way."""
        self._seconds: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        self._before: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        self._num_turns = 0
        self._warm: Engine | None = None
        """The one that has run steps of decode until now."""

    @property
    def num_rounds(self) -> float:
        """How often all cases had their turn."""
        return self._num_turns / len(self._kinds)

    def go_on(self, seconds: float, least_rounds: int = 0, say: Say = lambda _: None) -> list[StepSample]:
        """Goes on where it was, for about so long, and until there were so many rounds. Gives what it found meanwhile.
        Raises ModelError."""
        num_kinds = len(self._kinds)
        found: list[StepSample] = []
        until = time.monotonic() + seconds
        self._warm = None
        while time.monotonic() < until or self._num_turns < least_rounds * num_kinds:
            number, place = divmod(self._num_turns, num_kinds)
            if not place:
                say(f"steps of the engine: {num_kinds} of them, round {number + 1}")
                self._order = self._mixed(number)
            kind = self._order[place]
            before, taken = self._run(kind)
            self._before[kind] += before
            self._seconds[kind] += taken
            found.append(_sample(kind, taken, before))
            self._num_turns += 1
        return found

    def samples(self) -> list[StepSample]:
        """What was found so far, of cases that had a turn. What ran alone, and has nothing to be compared with, is told
        as it would have been with the usual share of slow whiles."""
        alone = {
            kind: _within_reason(each)
            for kind, each in self._seconds.items()
            if each and not self._before[kind]
        }
        usual: dict[Kind, float] = {}
        for is_decode in (True, False):
            usual |= usual_s(
                {k: each for k, each in alone.items() if (k.case.part is Part.DECODE) is is_decode}
            )
        return [
            _sample(kind, each, self._before[kind], usual.get(kind))
            for kind, each in self._seconds.items()
            if each
        ]

    def _run(self, kind: Kind) -> tuple[Sequence[float], Sequence[float]]:
        """What to compare it with, measured right before, and the kind itself."""
        case, num_busy, has_slept = kind
        engine, known = self._engine_of(case), self._seconds[kind]
        times = 1 if known and known[0] > SHORT_S else 1 + BURST
        is_stream = self._is_stream(kind)
        if is_stream and self._warm is not engine:
            warm_until = time.monotonic() + WARM_S
            while time.monotonic() < warm_until:
                engine.seconds(case.pieces, 1)
        self._warm = engine if is_stream else None

        def burst() -> Sequence[float]:
            return engine.seconds(case.pieces, times)[-BURST:]

        before = burst() if num_busy and not has_slept else ()
        with contextlib.ExitStack() as beside:
            if num_busy and self._other_than is not None:
                beside.enter_context(self._other_than(engine).looping(self._plan.beside(case).pieces))
            if not has_slept:
                return before, burst()
            before = burst()
            time.sleep(SLEEP_S)
            return before, engine.seconds(case.pieces, 1)

    def _is_stream(self, kind: Kind) -> bool:
        """Whether a decode worker runs such steps one after the other, with nobody beside it."""
        is_alone = not kind.num_busy and not kind.has_slept
        return self._other_than is not None and kind.case.part is Part.DECODE and is_alone

    def _mixed(self, number: int) -> list[Kind]:
        """The order of a round: such that even a short while has steps of all kinds, and a decode worker's follow each
        other."""
        order, kinds = random.Random(number), self._kinds
        streams = [kind for kind in kinds if self._is_stream(kind)]
        order.shuffle(streams)
        groups = [streams[first : first + GROUP] for first in range(0, len(streams), GROUP)]
        groups += [[kind] for kind in kinds if not self._is_stream(kind)]
        order.shuffle(groups)
        return [kind for group in groups for kind in group]


def _sample(
    kind: Kind, seconds: Sequence[float], before: Sequence[float], usual: float | None = None
) -> StepSample:
    case = kind.case
    return StepSample(
        part=case.part.value,
        name=case.name,
        shape=tuple(case.shape),
        num_busy=kind.num_busy,
        seconds=statistics.fmean(_within_reason(seconds)) if usual is None else usual,
        spread=spread(seconds),
        num_runs=len(seconds),
        each_s=tuple(seconds),
        before_s=statistics.fmean(_within_reason(before)) if before else None,
        has_slept=kind.has_slept,
        is_held_out=case.is_held_out,
    )


def _within_reason(seconds: Sequence[float]) -> list[float]:
    """Without those that are so far from the middle that something else has interrupted them."""
    middle = statistics.median(seconds)
    return [each for each in seconds if each <= FARTHEST * middle]
