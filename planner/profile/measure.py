"""A whole profile: which processes run where, what is measured in which order, and what is made of it."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import tokenizers

from twinpool import __version__
from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.noise import OTHERS_SHARE, STOLEN_SHARE
from twinpool.bench.comparison.stand import Hardware, Stand
from twinpool.bench.serving.datasets import PromptAs
from twinpool.coordinator.launch import share_cores, usable_cores
from twinpool.engine.model_config import ModelConfig
from twinpool.errors import TransferError
from twinpool.kv_transfer import shm_pool
from twinpool.planner.profile import transfer_runs
from twinpool.planner.profile.cases import BLOCK_SIZE, Part, full_plan, quick_plan
from twinpool.planner.profile.engine_messages import Facts, WorkerSettings
from twinpool.planner.profile.engine_runs import Engine, Sampler, engine
from twinpool.planner.profile.fit import (
    far_off,
    fit_slow_down,
    fit_steps,
    fit_transfers,
    residuals_of,
    unsteadiness_of,
    wake_s_of,
)
from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import (
    Measurements,
    Noise,
    Profile,
    ServedSteps,
    StepSample,
    TransferFit,
    TransferSample,
)
from twinpool.planner.profile.served import Served, served_of
from twinpool.planner.profile.served_loads import (
    FULL,
    KV_TOKENS,
    QUICK,
    OverheadLoads,
    prompts_as,
    run_loads,
)
from twinpool.planner.profile.watching import Watch
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads

Say = Callable[[str], None]
LIVES = 3
"""Of the engines: where the memory of a process lies is luck, which holds for as long as the process lives, and makes
all its steps longer or shorter. A server's workers will have other luck; what is measured is between."""
NOISY_SPREAD = 0.15
"""Repetitions that lie further apart, at the median over all shapes, say that the machine does something else, too."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What is profiled. `directory` is the model's, `model` its name, `asked` what the user called it (None: the
    default), which is what a server is started with."""

    directory: Path
    model: str
    asked: str | None
    tokenizer: tokenizers.Tokenizer
    dtype: str = "auto"
    weights: str = "auto"
    device: str = "cpu"
    threads: int = 1
    is_quick: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `twinpool serve`, for such workers."""
        model = () if self.asked is None else (self.asked,)
        return (
            *model, "--dtype", self.dtype, "--weights", self.weights, "--device", self.device,
            "--threads", str(self.threads),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Places:
    """The cores of two workers, as a server would give them; `has_two` says whether there are enough for both."""

    prompts: tuple[int, ...]
    decode: tuple[int, ...]
    has_two: bool

    @classmethod
    def of(cls, device: str, threads: int) -> Places:
        """On this machine."""
        cores = usable_cores()
        if device.startswith("cuda") or 2 * threads > len(cores):
            return cls((), (), has_two=False)
        first, second = share_cores(2, cores)
        return cls(first, second, has_two=True)


def measure(settings: ProfileSettings, say: Say) -> Profile:
    """Measures and fits; `say` is told what is measured now. What of it cannot be trusted is in the profile's warnings.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
        ModelError: the model cannot be read or run.
        TransferError, ServerFault, NoServer, OverheadsNotMeasured: a part failed; the message says which.
    """
    with Profiling(settings, say) as profiling:
        profiling.measure_steps()
        profiling.release()
        profiling.measure_around()
        return profiling.profile()


class Profiling:
    """One profile under way: its workers' engines, loaded, which run and end within this context.

    Steps can be measured in slices, with other things between them; what is around them is measured once, after each
    shape has run. All methods raise as `measure`.
    """

    def __init__(self, settings: ProfileSettings, say: Say) -> None:
        self._settings = settings
        self._say = say
        longest = ModelConfig.from_dir(settings.directory).max_positions
        self._plan = (quick_plan if settings.is_quick else full_plan)(longest)
        self._places = Places.of(settings.device, settings.threads)
        self._stack = ExitStack()
        self._transfers: list[TransferSample] = []
        self._skipped: dict[str, str] = {}
        self._served: Served | None = None
        self._engines: list[Engine] = []
        self._watch = Watch(self._own_cpu_s)
        self._sampler = Sampler(
            self._plan,
            lambda case: self._engines[-1 if case.part is Part.DECODE else 0],
            (lambda mine: next(each for each in self._engines if each is not mine))
            if self._places.has_two
            else None,
        )
        self._facts: Facts

    def __enter__(self) -> Self:
        self._load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def renew(self) -> None:
        """Ends the engines and starts new ones, their next life (`LIVES`)."""
        self._stack.close()
        self._load()

    def _load(self) -> None:
        """One worker, or two where there are cores for them: prompts on the one, decode on the other, each with its
        pool as a server's prefill and decode workers have theirs."""
        with ExitStack() as stack:
            self._engines = self._started(stack)
            for each in self._engines:
                each.load()
            self._facts = self._engines[0].facts
            self._stack = stack.pop_all()

    def _started(self, stack: ExitStack) -> list[Engine]:
        settings, places = self._settings, self._places

        def worker(cores: tuple[int, ...], name: str, *, is_shared: bool) -> Engine:
            wanted = WorkerSettings(
                directory=str(settings.directory), dtype=settings.dtype, weights=settings.weights,
                device=settings.device, threads=settings.threads, cores=cores, pool_tokens=self._plan.pool_tokens,
                most_decodes=max(len(case.lengths) for case in self._plan.alone), is_pool_shared=is_shared,
            )  # fmt: skip
            return stack.enter_context(engine(wanted, name))

        self._say(f"loading {settings.model}{' twice' if places.has_two else ''}")
        started = [worker(places.prompts, "the measured worker", is_shared=False)]
        if places.has_two:
            is_shared = shm_pool.why_unavailable() is None
            started.append(worker(places.decode, "the second worker", is_shared=is_shared))
        return started

    def measure_steps(self) -> None:
        """For as long as the plan wants; on a CPU in several lives of the engines."""
        plan, settings = self._plan, self._settings
        lives = 1 if settings.is_quick or settings.device.startswith("cuda") else LIVES
        for life in range(lives):
            if life:
                self.renew()
            with self._watch.watching():
                least_rounds = math.ceil(plan.least_rounds * (life + 1) / lives)
                self._sampler.go_on(plan.most_s / lives, least_rounds, self._say)

    def measure_slice(self, seconds: float) -> list[StepSample]:
        """For about so long. Gives what was found meanwhile."""
        with self._watch.watching():
            return self._sampler.go_on(seconds)

    def measure_rounds(self, number: int) -> None:
        """So many rounds of all steps."""
        with self._watch.watching():
            self._sampler.go_on(0.0, number, self._say)

    def release(self) -> None:
        """Ends the engines, whose memory a server may need: no more steps are measured."""
        self._stack.close()

    def measure_around(self) -> None:
        """Transfers, and what a server adds."""
        if self._places.has_two:
            self._say("transfers of KV between two processes")
            self._transfers, self._skipped = _transfers(self._settings, self._facts, self._places)
        self._served = _served(self._settings, self._profile(), self._places, self._say)

    def profile(self) -> Profile:
        """What all that was measured says."""
        noise = self._watch.noise(statistics.median(sample.spread for sample in self._sampler.samples()))
        profile = self._profile()
        warnings = [*far_off(profile.residuals), *_noise_words(noise), *_skipped_words(self._skipped)]
        if prompts_as(self._settings.tokenizer) is not PromptAs.TEXT:
            warnings.append(
                "prompts were sent as token ids, as this tokenizer joins words: tokenizing is not counted"
            )
        measurements = msgspec.structs.replace(profile.measurements, noise=noise)
        return msgspec.structs.replace(profile, measurements=measurements, warnings=tuple(warnings))

    def _own_cpu_s(self) -> float:
        return time.process_time() + sum(each.cpu_s() for each in self._engines)

    def _profile(self) -> Profile:
        """As it is by now, without a word on noise."""
        settings, facts = self._settings, self._facts
        steps, found = self._sampler.samples(), self._served
        fit = fit_steps(steps, self._plan.row_knots)
        wake_s, busy_wake_s = wake_s_of(steps)
        overheads = dataclasses.replace(
            Overheads() if found is None else found.overheads, wake_s=wake_s, busy_wake_s=busy_wake_s
        )
        alone = Profile(
            model=settings.model,
            dtype=facts.dtype,
            weights=settings.weights,
            threads=settings.threads,
            block_size=facts.block_size,
            kv_token_bytes=facts.kv_token_bytes,
            max_model_len=facts.max_model_len,
            machine=facts.machine,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            version=__version__,
            is_quick=settings.is_quick,
            num_cores=len(usable_cores()) if settings.device == "cpu" else None,
            steps=fit,
            slow_down=fit_slow_down(fit, steps),
            served=ServedSteps(),
            transfers=fit_transfers(self._transfers),
            overheads=overheads,
            unsteadiness=unsteadiness_of(steps),
            residuals=(),
            measurements=Measurements(
                tuple(steps),
                tuple(self._transfers),
                () if found is None else found.samples,
                Noise(0, 0, 0, 0),
            ),
        )
        moves = {each.transport: each for each in alone.transfers}
        residuals = residuals_of(steps, self._transfers, _predicts(FittedTimes(alone)), _moves(moves))
        return msgspec.structs.replace(
            alone, residuals=residuals, served=ServedSteps() if found is None else found.steps
        )


def _transfers(
    settings: ProfileSettings, facts: Facts, places: Places
) -> tuple[list[TransferSample], dict[str, str]]:
    tokens = transfer_runs.QUICK_TOKENS if settings.is_quick else transfer_runs.FULL_TOKENS
    rounds = transfer_runs.QUICK_ROUNDS if settings.is_quick else transfer_runs.FULL_ROUNDS
    found = transfer_runs.measure_transfers(
        transfer_runs.TransferSettings(
            directory=str(settings.directory), dtype=facts.dtype, block_size=facts.block_size, tokens=tokens,
            rounds=rounds, core=places.prompts[0], other_core=places.decode[0],
        )
    )  # fmt: skip
    if not found[0]:
        raise TransferError(
            f"KV cannot be moved between two processes here: {'; '.join(_skipped_words(found[1]))}; to profile one "
            "worker alone, give --threads more than half of the cores"
        )
    return found


def _served(settings: ProfileSettings, profile: Profile, places: Places, say: Say) -> Served:
    times = FittedTimes(profile)
    arm = Arm("1P1D", ("--prefill", "1", "--decode", "1"), num_workers=2)
    if not places.has_two:
        arm = Arm("1 colocated", ("--colocated", "1"))
    sizes = QUICK if settings.is_quick else FULL
    loads = OverheadLoads(settings.tokenizer, profile.max_model_len, times, sizes)
    hardware = Hardware(settings.flags, KV_TOKENS, BLOCK_SIZE)
    with (
        tempfile.TemporaryDirectory(prefix="twinpool-profile-") as folder,
        Stand(hardware, Path(folder)) as stand,
    ):
        runs = run_loads(stand, arm, loads, say, on_gpu=settings.device.startswith("cuda"))

    num_layers = ModelConfig.from_dir(settings.directory).num_layers

    def last_layer_s(num_tokens: int) -> float:
        num_blocks = -(-num_tokens // profile.block_size)
        return times.transfer_s(num_blocks * profile.block_size * profile.kv_token_bytes // num_layers)

    return served_of(runs, last_layer_s if places.has_two else None)


def _predicts(times: FittedTimes) -> Callable[[StepSample], float]:
    over = times.overheads

    def step_s(sample: StepSample) -> float:
        seconds = times.step_s(StepShape(*sample.shape), sample.num_busy)
        return seconds + sample.has_slept * (over.wake_s + sample.num_busy * over.busy_wake_s)

    return step_s


def _moves(fits: dict[str, TransferFit]) -> Callable[[TransferSample], float]:
    def transfer_s(sample: TransferSample) -> float:
        fit = fits[sample.transport]
        return fit.start_s + fit.byte_s * sample.num_bytes

    return transfer_s


def _noise_words(noise: Noise) -> list[str]:
    words = []
    if noise.others_share > OTHERS_SHARE:
        words.append(
            f"other programs used {noise.others_share:.0%} of the cores meanwhile: end them, measure again"
        )
    if noise.stolen_share > STOLEN_SHARE:
        words.append(f"other machines on this host took {noise.stolen_share:.0%} of the cores meanwhile")
    if noise.spread > NOISY_SPREAD:
        words.append(
            f"repetitions of a step lie {noise.spread:.0%} apart: the machine is not steady, and single runs will be "
            "as far from predictions"
        )
    return words


def _skipped_words(skipped: dict[str, str]) -> list[str]:
    return [f"transfers by {transport} were not measured: {reason}" for transport, reason in skipped.items()]
