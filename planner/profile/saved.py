"""A profile as a file: what was measured on which machine, the model fitted to it, and how well that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from twinpool.config import BLOCK_SIZES
from twinpool.errors import ConfigError
from twinpool.layout import COMPUTE_DTYPES
from twinpool.planner.times.service_times import Overheads

_LONGEST_S = 3600.0
"""Of whatever a profile says: more is a mistake, which a simulation would take for ever about."""
FORMAT = 4
"""Of the file; another number means other fields."""


class StepFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step of one worker that computes alone, as a sum of parts, none of which is negative.

    `rows_s[i]` is what the matrix products of `row_knots[i]` tokens take, with all that every step costs: reading the
    weights is in all of them, and arithmetic makes them rise. Between two knots it is interpolated. Kernels work in
    tiles of rows: more rows than the knot before `row_knots[i]` has count as whole tiles of `row_tiles[i]`. The others
    are per unit of what a `StepShape` counts: `sequence_s` (its row of the head,
    sampling), `chunk_s`, `context_token_s` (KV that sequences read), `prompt_pair_s` (arithmetic of a prompt's
    attention), `prompt_context_token_s` (KV that chunks read). A step that has both costs `both_s` more, and
    `beside_sequence_s` for each of its sequences: work of two kinds divides less evenly among threads.
    """

    row_knots: tuple[int, ...]
    row_tiles: tuple[int, ...]
    rows_s: tuple[float, ...]
    sequence_s: float
    chunk_s: float
    context_token_s: float
    prompt_pair_s: float
    prompt_context_token_s: float
    both_s: float
    beside_sequence_s: float


class SlowDown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By how much a part of a step takes longer for each other worker of the machine that computes, as a share of what
    it takes alone: `memory` is what waits for memory (the products of one token, which read the weights, and reading
    KV), `arithmetic` the rest (what more tokens add to the products, and a prompt's attention)."""

    memory: float
    arithmetic: float


class ServedSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step takes longer in a server than in the engine alone: `step_s` from one step to the next and while
    others have its core, for each sequence `sequence_s`, as its tokens are delivered on the same cores, and for each
    chunk `chunk_s`, as what coordinator and client do for its request is done there, too. While another worker computes
    a chunk takes `beside_chunk_s` more; for each other worker that does, a step with sequences takes `busy_step_s` and
    `busy_sequence_s` more."""

    step_s: float = 0.0
    sequence_s: float = 0.0
    chunk_s: float = 0.0
    beside_chunk_s: float = 0.0
    busy_step_s: float = 0.0
    busy_sequence_s: float = 0.0


class TransferFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a transfer of KV by one transport: `start_s`, and `byte_s` more for each byte."""

    transport: str
    start_s: float
    byte_s: float


class Residuals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the model is from what was measured in one part: |predicted ÷ measured − 1|. `bias` is the median with
    its sign, `num_points` how many shapes there were, `worst_case` names the one furthest off."""

    part: str
    num_points: int
    median: float
    p90: float
    worst: float
    bias: float
    worst_case: str


class StepSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured shape of a step: `shape` as the numbers of a `StepShape`, the mean of its repetitions, and their
    spread (middle half ÷ median). `num_busy` other workers computed meanwhile. With `has_slept` the worker had nothing
    to do before; else steps of this shape came before. `each_s` are the repetitions, in order, and `before_s` is the
    mean of as many that were measured right before each of them: of a busy case the shape alone, of one that has slept
    the shape among such steps. The fit has not seen what `is_held_out`.
    """

    part: str
    name: str
    shape: tuple[int, ...]
    num_busy: int
    seconds: float
    spread: float
    num_runs: int
    is_held_out: bool = False
    each_s: tuple[float, ...] = ()
    before_s: float | None = None
    has_slept: bool = False


class TransferSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured transfer: the median of its repetitions, and their spread."""

    transport: str
    num_bytes: int
    seconds: float
    spread: float
    num_runs: int


class ServedSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One figure that was measured through a server: its name, median and spread, and of how many."""

    name: str
    seconds: float
    spread: float
    num_runs: int


class Unsteadiness(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How unsteady the machine is: equally likely factors by which a step took longer or shorter than the model says,
    with a mean of 1 each. `decode` of steps without, `prompt` of steps with many tokens of prompts."""

    decode: tuple[float, ...] = (1.0,)
    prompt: tuple[float, ...] = (1.0,)


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What else the machine did meanwhile, as shares of all its cores: `stolen_share` is what the machine below this
    one took. `spread` is the median spread of the steps' repetitions."""

    others_share: float
    stolen_share: float
    load_average: float
    spread: float


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model was fitted to: enough to fit it again."""

    steps: tuple[StepSample, ...]
    transfers: tuple[TransferSample, ...]
    served: tuple[ServedSample, ...]
    noise: Noise


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker of one machine: `threads` of it compute `model` in `dtype`. `machine` says what it is, in JSON values.

    `transfers` has one fit for each transport that works here, the one that a server prefers first; it may be empty.
    `slow_down` is None where two such workers have not cores enough: then they share those they have. `num_cores` is
    what its workers share; None: nobody knows, or they compute elsewhere. `warnings` say why its figures may be wrong.
    """

    format: int = FORMAT
    model: str
    dtype: str
    weights: str
    threads: int
    block_size: int
    kv_token_bytes: int
    max_model_len: int
    machine: dict[str, Any]
    measured_at: str
    version: str
    is_quick: bool
    steps: StepFit
    slow_down: SlowDown | None
    served: ServedSteps
    transfers: tuple[TransferFit, ...]
    overheads: Overheads
    unsteadiness: Unsteadiness
    residuals: tuple[Residuals, ...]
    measurements: Measurements
    num_cores: int | None = None
    warnings: tuple[str, ...] = ()


class _Format(msgspec.Struct):
    format: int


def to_json(profile: Profile) -> bytes:
    """The file's content, for people to read, too."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def from_json(data: bytes, name: str) -> Profile:
    """The profile in a file called `name`. Raises ConfigError if it is none, or not one that this version reads."""
    try:
        if (found := msgspec.json.decode(data, type=_Format).format) != FORMAT:
            raise ConfigError(
                f"{name} is a profile of format {found}, this version reads format {FORMAT}: measure again with "
                "`twinpool profile`"
            )
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{name} is not a profile of `twinpool profile`: {exc}") from exc
    _check(profile, name)
    return profile


def load_profile(path: Path) -> Profile:
    """Reads a file. Raises ConfigError if it cannot be read or is not a profile."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"profile {str(path)!r} cannot be read: {exc.strerror}; make one with `twinpool profile --output FILE`"
        ) from exc
    return from_json(data, str(path))


def save_profile(profile: Profile, path: Path) -> None:
    """Writes a file, whole or not at all (a device or a pipe as it is). Raises ConfigError if it cannot be written."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(to_json(profile))
            return
        unfinished = path.with_name(path.name + ".part")
        try:
            unfinished.write_bytes(to_json(profile))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"--output is {str(path)!r}, which cannot be written: {exc.strerror}") from exc


def _check(profile: Profile, name: str) -> None:
    """What types do not say: a model that could fall, or go below zero, is none. Raises ConfigError."""
    _check_worker(profile, name)
    fit = profile.steps
    knots, times = fit.row_knots, fit.rows_s
    if len(knots) < 2 or len(knots) != len(times) or knots[0] != 1 or list(knots) != sorted(set(knots)):
        raise ConfigError(
            f"{name}: steps.row_knots is {knots}; wanted: two or more numbers that rise from 1, as many as rows_s"
        )
    if len(fit.row_tiles) != len(knots) or min(fit.row_tiles) < 1:
        raise ConfigError(
            f"{name}: steps.row_tiles is {fit.row_tiles}; wanted: numbers above 0, as many as row_knots"
        )
    if list(times) != sorted(times):
        raise ConfigError(f"{name}: steps.rows_s is {times}; wanted: times that never fall")
    parts: list[tuple[str, object]] = [
        ("steps", fit),
        ("slow_down", profile.slow_down),
        ("served", profile.served),
        ("overheads", profile.overheads),
        *(("transfers", each) for each in profile.transfers),
    ]
    for part, value in parts:
        for field, number in msgspec.to_builtins(value).items() if value is not None else ():
            if isinstance(number, float) and not 0 <= number <= _LONGEST_S:
                raise ConfigError(
                    f"{name}: {part}.{field} is {number}; wanted: seconds or a share, 0 to {_LONGEST_S:.0f}"
                )
    if not 0 <= times[0] <= times[-1] <= _LONGEST_S:
        raise ConfigError(f"{name}: steps.rows_s is {times}; wanted: seconds, 0 to {_LONGEST_S:.0f}")


def _check_worker(profile: Profile, name: str) -> None:
    wanted = {
        "dtype": (profile.dtype in COMPUTE_DTYPES, ", ".join(COMPUTE_DTYPES)),
        "block_size": (profile.block_size in BLOCK_SIZES, ", ".join(map(str, BLOCK_SIZES))),
        "threads": (profile.threads >= 1, "1 or more"),
        "num_cores": (profile.num_cores is None or profile.num_cores >= 1, "1 or more"),
        "max_model_len": (profile.max_model_len >= 2, "2 or more"),
        "kv_token_bytes": (profile.kv_token_bytes >= 1, "1 or more"),
    }
    for field, (is_right, allowed) in wanted.items():
        if not is_right:
            raise ConfigError(f"{name}: {field} is {getattr(profile, field)!r}; wanted: {allowed}")
    for field, factors in msgspec.to_builtins(profile.unsteadiness).items():
        if not factors or not all(0 < factor <= _LONGEST_S for factor in factors):
            raise ConfigError(
                f"{name}: unsteadiness.{field} is {factors}; wanted: one or more factors above 0"
            )
