"""A whole profile: which processes run where, what is measured in which order, and what is made of it."""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import tokenizers

from twinpool import __version__
from twinpool.bench.comparison.arms import Arm
from twinpool.bench.comparison.noise import OTHERS_SHARE, STOLEN_SHARE, NoiseMeter
from twinpool.coordinator.launch import share_cores, usable_cores
from twinpool.engine.model_config import ModelConfig
from twinpool.errors import TransferError
from twinpool.kv_transfer import shm_pool
from twinpool.planner.profile import served, transfer_runs
from twinpool.planner.profile.cases import BLOCK_SIZE, Case, Part, StepPlan, full_plan, quick_plan
from twinpool.planner.profile.engine_runs import (
    Engine,
    Facts,
    WorkerSettings,
    engine,
    measure_alone,
    measure_busy,
)
from twinpool.planner.profile.fit import far_off, fit_slow_down, fit_steps, fit_transfers, residuals_of
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
from twinpool.planner.step_shape import StepShape
from twinpool.planner.times.service_times import Overheads

Say = Callable[[str], None]
NOISY_SPREAD = 0.15
"""Repetitions that lie further apart, at the median over all shapes, say that something else was running."""


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
    device: str = "auto"
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
    meter, before_s = NoiseMeter(), _own_cpu_s()
    longest = ModelConfig.from_dir(settings.directory).max_positions
    plan = (quick_plan if settings.is_quick else full_plan)(longest)
    places = Places.of(settings.device, settings.threads)
    facts, steps = _steps(settings, plan, places, say)
    transfers: list[TransferSample] = []
    skipped: dict[str, str] = {}
    if places.has_two:
        say("transfers of KV between two processes")
        transfers, skipped = _transfers(settings, facts, places)
    say("fitting the engine's steps")
    fit = fit_steps(steps, plan.row_knots)
    profile = Profile(
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
        steps=fit,
        slow_down=fit_slow_down(fit, steps),
        served=ServedSteps(),
        transfers=fit_transfers(transfers),
        overheads=Overheads(),
        residuals=(),
        measurements=Measurements(tuple(steps), tuple(transfers), (), Noise(0, 0, 0, 0)),
    )
    found = _served(settings, profile, places, say)
    seen = meter.stop(_own_cpu_s() - before_s)
    noise = Noise(
        seen.others_share,
        seen.stolen_share,
        seen.load_average,
        statistics.median(sample.spread for sample in steps),
    )
    residuals = residuals_of(
        steps,
        transfers,
        _predicts(FittedTimes(profile)),
        _moves({fit.transport: fit for fit in profile.transfers}),
    )
    return msgspec.structs.replace(
        profile,
        served=found.steps,
        overheads=found.overheads,
        residuals=residuals,
        measurements=Measurements(tuple(steps), tuple(transfers), found.samples, noise),
        warnings=(*far_off(residuals), *_noise_words(noise), *_skipped_words(skipped)),
    )


def _steps(
    settings: ProfileSettings, plan: StepPlan, places: Places, say: Say
) -> tuple[Facts, list[StepSample]]:
    """On two workers where there are cores for them: prompts on the one, decode on the other, each with its pool as
    a server's prefill and decode workers have theirs."""

    def worker(cores: tuple[int, ...], *, is_shared: bool) -> WorkerSettings:
        return WorkerSettings(
            directory=str(settings.directory), dtype=settings.dtype, weights=settings.weights, device=settings.device,
            threads=settings.threads, cores=cores, pool_tokens=plan.pool_tokens,
            most_decodes=max(len(case.lengths) for case in plan.alone),
            is_pool_shared=is_shared,
        )  # fmt: skip

    say(f"loading {settings.model}{' twice' if places.has_two else ''}")
    with ExitStack() as stack:
        prompts = stack.enter_context(engine(worker(places.prompts, is_shared=False), "the measured worker"))
        decode = prompts
        if places.has_two:
            is_shared = shm_pool.why_unavailable() is None
            decode = stack.enter_context(
                engine(worker(places.decode, is_shared=is_shared), "the second worker")
            )
            decode.load()
        prompts.load()

        def engine_of(case: Case) -> Engine:
            return decode if case.part is Part.DECODE else prompts

        samples = measure_alone(plan, engine_of, say)
        if places.has_two:
            samples += measure_busy(plan, engine_of, lambda mine: prompts if mine is decode else decode, say)
        return prompts.facts, samples


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
        raise TransferError(f"no transport works here: {found[1]}")
    return found


def _served(settings: ProfileSettings, profile: Profile, places: Places, say: Say) -> served.Served:
    times = FittedTimes(profile)
    arm = Arm("1P1D", ("--prefill", "1", "--decode", "1"), num_workers=2)
    if not places.has_two:
        arm = Arm("1 colocated", ("--colocated", "1"))
    sizes = served.QUICK if settings.is_quick else served.FULL
    with tempfile.TemporaryDirectory(prefix="twinpool-profile-") as folder:
        runs = served.run_loads(
            arm, settings.flags, BLOCK_SIZE, settings.tokenizer, profile.max_model_len, times, sizes,
            Path(folder), say,
        )  # fmt: skip

    num_layers = ModelConfig.from_dir(settings.directory).num_layers

    def last_layer_s(num_tokens: int) -> float:
        num_blocks = -(-num_tokens // profile.block_size)
        return times.transfer_s(num_blocks * profile.block_size * profile.kv_token_bytes // num_layers)

    shares_cores = settings.threads >= len(usable_cores()) and not str(settings.device).startswith("cuda")
    return served.served_of(runs, last_layer_s if places.has_two else None, shares_cores=shares_cores)


def _predicts(times: FittedTimes) -> Callable[[StepSample], float]:
    return lambda sample: times.step_s(StepShape(*sample.shape), sample.num_busy)


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
        words.append(f"repetitions of a step lie {noise.spread:.0%} apart: the machine was not quiet")
    return words


def _skipped_words(skipped: dict[str, str]) -> list[str]:
    return [f"transfers by {transport} were not measured: {reason}" for transport, reason in skipped.items()]


def _own_cpu_s() -> float:
    """Of this process and of all that it has started and that has ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
