"""Which measurements there are, of which sizes, and how they run one after the other until all are done, or Ctrl-C."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from twinpool.bench.engine import GROUPS, operations, steps
from twinpool.bench.engine.ceilings import CpuLimits, Limits, limits_of
from twinpool.bench.engine.cold_start import cold_start
from twinpool.bench.engine.floors import Ceilings, Piece
from twinpool.bench.engine.machine import describe
from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.model_bed import BLOCK_SIZE, ModelBed, shape_of
from twinpool.bench.engine.report import EngineReport, Measurement
from twinpool.bench.engine.timing import spread, timer_for
from twinpool.coordinator.launch import usable_cores
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_runner import resolve_device, resolve_dtype
from twinpool.errors import ModelError, TransferError
from twinpool.layout import Dtype

CEILING_ROUNDS = 7
MOST_MOVED = 0.2
"""A machine whose limits differ more before anything else is measured is doing something else."""
Cases = Sequence[tuple[str, Sequence[Piece]]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. `decode` has (batch, context), `rows` those of matrix products, `tokens` those of what only
    moves; `rounds` and `most_s` bound each measurement."""

    rounds: int
    most_s: float
    prompts: Sequence[int]
    decode: Sequence[tuple[int, int]]
    attention: Cases
    rows: Sequence[int]
    tokens: Sequence[int]
    batches: Sequence[int]
    transferred: Sequence[int]
    starts: int
    streams: int = 64

    @property
    def pool_tokens(self) -> int:
        """Tokens that the largest step holds, whole blocks."""
        cases = [pieces for _, pieces in self.attention]
        cases += [[Piece(context - 1, 1)] * batch for batch, context in self.decode]
        return max(sum(piece.start + piece.count + BLOCK_SIZE for piece in pieces) for pieces in cases)


_PUSHED_TOKENS = 512
"""As a prefill worker computes them in one step."""

FULL = Sizes(
    rounds=9,
    most_s=6.0,
    prompts=(128, 512, 1024, 2048),
    decode=((1, 512), (1, 2048), (8, 512), (32, 300), (32, 1024)),
    attention=(
        ("decode, batch 1, context 512", [Piece(511, 1)]),
        ("decode, batch 1, context 2048", [Piece(2047, 1)]),
        ("decode, batch 32, context 300", [Piece(299, 1)] * 32),
        ("prefill, 512 tokens", [Piece(0, 512)]),
        ("prefill, 2048 tokens", [Piece(0, 2048)]),
        ("prefill, 512 tokens behind 1536", [Piece(1536, 512)]),
    ),
    rows=(1, 8, 32, 512),
    tokens=(32, 512),
    batches=(1, 32),
    transferred=(16, 256, 1024),
    starts=3,
)
QUICK = Sizes(
    rounds=5,
    most_s=2.0,
    prompts=(128, 512),
    decode=((1, 512), (32, 300)),
    attention=(
        ("decode, batch 32, context 300", [Piece(299, 1)] * 32),
        ("prefill, 512 tokens", [Piece(0, 512)]),
    ),
    rows=(1, 32, 512),
    tokens=(512,),
    batches=(32,),
    transferred=(1024,),
    starts=1,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure on.

    `cores`, of those that this process may use, are pinned to (empty: not); `other_core` is the far end's of a transfer
    (None: any). `only` names groups (empty: all), or the ceilings.
    """

    directory: Path
    model: str
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 1
    cores: tuple[int, ...] = ()
    other_core: int | None = None
    is_quick: bool = False
    only: tuple[str, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """Quick or full."""
        return QUICK if self.is_quick else FULL


@dataclass(slots=True)
class Run:
    """One run under way. The model is loaded when the first measurement needs it."""

    settings: Settings
    device: torch.device
    dtype: Dtype
    bench: Bench
    skipped: dict[str, str] = field(default_factory=dict)
    _bed: ModelBed | None = None

    @property
    def bed(self) -> ModelBed:
        """The loaded model."""
        if self._bed is None:
            chosen = self.settings
            self._bed = ModelBed(
                chosen.directory, self.dtype, str(self.device), chosen.threads, chosen.sizes.pool_tokens
            )
        return self._bed


def _prefill(run: Run) -> None:
    steps.prefill(run.bench, run.bed, run.settings.sizes.prompts)


def _decode(run: Run) -> None:
    steps.decode(run.bench, run.bed, run.settings.sizes.decode)


def _attention(run: Run) -> None:
    operations.attention(run.bench, run.bed, run.settings.sizes.attention)


def _kv(run: Run) -> None:
    operations.kv(run.bench, run.bed, run.settings.sizes.tokens)


def _linear(run: Run) -> None:
    operations.linear(run.bench, run.bed, run.settings.sizes.rows)


def _elementwise(run: Run) -> None:
    operations.elementwise(run.bench, run.bed, run.settings.sizes.tokens)


def _sampling(run: Run) -> None:
    operations.sampling(run.bench, run.bed, run.settings.sizes.batches)


def _transfer(run: Run) -> None:
    from twinpool.bench.engine.transfers import transfers

    chosen = run.settings
    layout = ModelConfig.from_dir(chosen.directory).kv_layout(BLOCK_SIZE, run.dtype)
    transfers(run.bench, layout, chosen.sizes.transferred, chosen.other_core, run.skipped)


def _push(run: Run) -> None:
    from twinpool.bench.engine.pushing import pushing

    pushing(run.bench, run.bed, _PUSHED_TOKENS, run.settings.other_core, run.skipped)


def _coordinator(run: Run) -> None:
    from twinpool.bench.engine.coordination import coordinator

    layout = ModelConfig.from_dir(run.settings.directory).kv_layout(BLOCK_SIZE, run.dtype)
    coordinator(run.bench, layout, run.settings.sizes.streams)


def _start(run: Run) -> None:
    chosen = run.settings
    cold_start(run.bench, chosen.directory, run.dtype, str(run.device), chosen.threads, chosen.sizes.starts)


_MEASURE: tuple[Callable[[Run], None], ...] = (
    _prefill,
    _decode,
    _attention,
    _kv,
    _linear,
    _elementwise,
    _sampling,
    _transfer,
    _push,
    _coordinator,
    _start,
)


def measure(
    settings: Settings, publish: Callable[[Measurement], None], warn: Callable[[str], None]
) -> EngineReport:
    """Runs the chosen groups in order; after Ctrl-C the report has what was found until then, and a group that fails
    later than the first result leaves those of the others. `warn` is told at once why figures may be wrong.

    Raises:
        ConfigError: a setting does not fit the model or this machine.
        ModelError: the model cannot be read or run, and nothing is measured yet.
        TransferError: a link failed, and nothing is measured yet.
    """
    usable = usable_cores()
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    shape = shape_of(ModelConfig.from_dir(settings.directory), dtype)
    others = _other_ceilings(device, dtype, settings.threads, len(usable))
    if settings.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)
    limits = limits_of(device, _torch(dtype), settings.threads)
    sizes = settings.sizes
    bench = Bench(timer_for(device), limits, sizes.rounds, sizes.most_s, publish)
    run = Run(settings, device, dtype, bench)
    failed: dict[str, str] = {}
    warnings: list[str] = []
    is_complete = False
    try:
        for _ in range(CEILING_ROUNDS):
            bench.measure_limits()
        warnings = _moved(bench.ceilings)
        for line in warnings:
            warn(line)
        for name, group in zip(GROUPS, _MEASURE, strict=True):
            if not settings.only or name in settings.only:
                try:
                    group(run)
                except (ModelError, TransferError) as exc:
                    if not bench.measurements:
                        raise
                    failed[name] = str(exc)
        is_complete = True
    except KeyboardInterrupt:
        pass  # the report says that it is not complete
    return EngineReport(
        machine=describe(device),
        settings={
            "what": f"{settings.model} in {dtype}, {settings.threads} thread{'' if settings.threads == 1 else 's'}",
            "model": settings.model,
            "dtype": dtype.value,
            "threads": settings.threads,
            "cores": settings.cores,
            "usable_cores": usable,
            "is_quick": settings.is_quick,
            "only": settings.only,
            "shape": shape,
        },
        ceilings={_name(settings.threads, dtype): _median(bench.ceilings), **others},
        measurements=tuple(bench.measurements),
        skipped=run.skipped,
        failed=failed,
        warnings=tuple(warnings),
        is_complete=is_complete,
    )


def _other_ceilings(device: torch.device, dtype: Dtype, threads: int, num_cores: int) -> dict[str, Ceilings]:
    """On a CPU: the limits in float32 too, and those of all cores together."""
    if device.type != "cpu":
        return {}
    pairs = [(count, kind) for count in (threads, num_cores) for kind in (dtype, Dtype.FLOAT32)]
    return {
        _name(count, kind): _rounds(CpuLimits(_torch(kind), count))
        for count, kind in dict.fromkeys(pairs)
        if (count, kind) != (threads, dtype)
    }


def _rounds(limits: Limits) -> Ceilings:
    """The medians of several rounds."""
    return _median([limits.measure() for _ in range(CEILING_ROUNDS)])


def _median(rounds: Sequence[Ceilings]) -> Ceilings:
    return Ceilings(
        statistics.median(ceilings.bytes_per_s for ceilings in rounds),
        statistics.median(ceilings.flops_per_s for ceilings in rounds),
    )


def _moved(rounds: Sequence[Ceilings]) -> list[str]:
    """A line for each limit that was another from round to round."""
    limits = {
        "bandwidth of memory": [ceilings.bytes_per_s for ceilings in rounds],
        "rate of products": [ceilings.flops_per_s for ceilings in rounds],
    }
    return [
        f"busy machine: the {name} moves by {width:.0%}; end what else runs, measure again"
        for name, seen in limits.items()
        if (width := spread(seen)) > MOST_MOVED
    ]


def _name(threads: int, dtype: Dtype) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}, {dtype}"


def _torch(dtype: Dtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found
