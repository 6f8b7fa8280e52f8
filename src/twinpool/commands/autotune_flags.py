"""Flags of `serve` for live tuning of the pools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from twinpool.commands.flags import transfer_config
from twinpool.config import CoordinatorConfig, PoolPlan, SchedulerConfig, TransportName
from twinpool.errors import ConfigError
from twinpool.planner.autotune.settings import (
    ATTAINMENT,
    COOL_DOWN_S,
    HYSTERESIS,
    LEAST_WORKERS,
    WINDOW_S,
    AutotuneSettings,
    Mode,
    WorkerBounds,
)

if TYPE_CHECKING:
    from twinpool.coordinator.tuning import Tuner
    from twinpool.planner.profile.saved import Profile

_FEWEST_TO_ACT = LEAST_WORKERS + 1


class _Number(NamedTuple):
    """A flag for a number among `AutotuneSettings`."""

    flag: str
    field: str
    unit: str
    text: str

    @property
    def name(self) -> str:
        """As argparse calls it."""
        return self.flag.removeprefix("--").replace("-", "_")


_NUMBERS = (
    _Number("--autotune-window", "window_s", "SECONDS",
            f"of traffic that a recommendation is of ({WINDOW_S:g})"),
    _Number("--autotune-cool-down", "cool_down_s", "SECONDS",
            f"between changes; every way back doubles it ({COOL_DOWN_S:g})"),
    _Number("--autotune-hysteresis", "hysteresis", "SHARE",
            f"gain of capacity that a change must exceed ({HYSTERESIS:g})"),
    _Number("--attainment", "attainment", "SHARE",
            f"of requests that are to meet the objectives ({ATTAINMENT:g})"),
)  # fmt: skip


def add_autotune_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tuner_to_serve_with`."""
    group = parser.add_argument_group("live tuning of the pools (docs/pools.md)")
    group.add_argument(
        "--autotune", choices=[mode.value for mode in Mode], default=Mode.OFF.value,
        help="advise: say how many prefill and decode workers would serve the traffic better; act: change roles, too "
        "(default off)",
    )  # fmt: skip
    group.add_argument(
        "--profile", metavar="FILE", help="how long these workers take, by `twinpool profile --output FILE`"
    )
    group.add_argument(
        "--slo", action="append", default=[], metavar="METRIC=TIME",
        help="objective of each request: ttft, itl (p99 of its gaps), tpot or e2el; like ttft=2s, itl=50ms",
    )  # fmt: skip
    for number in _NUMBERS:
        group.add_argument(number.flag, type=float, metavar=number.unit, help=number.text)
    group.add_argument(
        "--autotune-workers",
        metavar="MIN:MAX",
        help="so many workers, of both roles together, may be started and drained to (default: their number stays)",
    )
    group.add_argument(
        "--autotune-log", metavar="FILE",
        help="a line of JSON for each recommendation, and one for what was then measured; a FILE of before is moved to "
        "FILE.1",
    )  # fmt: skip


def tuner_to_serve_with(
    args: argparse.Namespace, plan: PoolPlan, config: CoordinatorConfig, scheduler: SchedulerConfig
) -> Tuner | None:
    """What tunes the pools of `plan`; None if nothing is to. Raises ConfigError."""
    if args.autotune == Mode.OFF:
        given = {"--profile": args.profile, "--slo": args.slo, "--autotune-log": args.autotune_log}
        given["--autotune-workers"] = args.autotune_workers
        given |= {number.flag: getattr(args, number.name) for number in _NUMBERS}
        for flag, value in given.items():
            if value:
                raise ConfigError(f"{flag} is for --autotune advise or act; give that too, or leave it out")
        return None
    _check_pools(args, plan, config, is_hybrid=scheduler.hybrid)
    if args.profile is None:
        raise ConfigError(
            f"--autotune {args.autotune} needs to know how long workers take; measure that once with `twinpool profile "
            "--output profile.json` and give --profile profile.json"
        )
    from twinpool.bench.serving.slo import parse_slo
    from twinpool.planner.autotune.regret_log import RegretLog
    from twinpool.planner.autotune.tuner import PoolTuner

    slo = parse_slo(args.slo)
    if slo is None:
        raise ConfigError(
            f"--autotune {args.autotune} needs objectives: say which, like --slo ttft=2s --slo itl=50ms"
        )
    numbers = {
        number.field: value for number in _NUMBERS if (value := getattr(args, number.name)) is not None
    }
    workers = None if args.autotune_workers is None else WorkerBounds.parse(args.autotune_workers)
    settings = AutotuneSettings(Mode(args.autotune), slo, workers=workers, **numbers)
    profile, transport = _profile(args, config)
    regret_log = None if args.autotune_log is None else RegretLog(args.autotune_log)
    return PoolTuner(settings, profile, transport, scheduler, config, regret_log)


def _check_pools(
    args: argparse.Namespace, plan: PoolPlan, config: CoordinatorConfig, *, is_hybrid: bool
) -> None:
    if plan.colocated:
        raise ConfigError(
            f"--autotune {args.autotune} is for two pools, and --colocated {plan.colocated} is one; leave one out"
        )
    if args.autotune == Mode.ACT and is_hybrid:
        raise ConfigError(
            "--autotune act changes roles, and --hybrid workers keep theirs; say --autotune advise, or leave one out"
        )
    count = plan.prefill + plan.decode
    has_own_only = config.control == CoordinatorConfig().control and args.autotune_workers is None
    if args.autotune == Mode.ACT and count < _FEWEST_TO_ACT and has_own_only:
        raise ConfigError(
            f"--autotune act has nothing to change with {count} workers, one of each role: have {_FEWEST_TO_ACT} or "
            "more (--prefill, --decode), let it start some (--autotune-workers), let workers of other hosts join "
            "(--control), or say --autotune advise"
        )


def _profile(args: argparse.Namespace, config: CoordinatorConfig) -> tuple[Profile, str | None]:
    """The profile, and the transport that the server's flags name, if it has that. Raises ConfigError, ModelError."""
    from twinpool.engine.default_model import DEFAULT_MODEL
    from twinpool.engine.model_files import resolve
    from twinpool.planner.profile.fitted_times import FittedTimes
    from twinpool.planner.profile.saved import load_profile

    profile = load_profile(Path(args.profile))
    own_name = DEFAULT_MODEL if args.model is None else resolve(args.model, needs_weights=False).name
    if profile.model not in (own_name, config.served_model_name):
        raise ConfigError(
            f"--profile {args.profile} is of the model {profile.model!r}, and {own_name!r} is to be served; measure "
            "that with `twinpool profile`"
        )
    named = transfer_config(args, "local").transport
    known = {fit.transport for fit in profile.transfers}
    transport = None if named is TransportName.AUTO or named.value not in known else named.value
    FittedTimes(profile, transport).transfer_s(1)  # raises where nobody knows how long KV takes
    return profile, transport
