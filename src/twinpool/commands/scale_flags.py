"""Flags of `serve` for who starts and ends its workers."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.coordinator.scaler import MakeScaler


def add_scale_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `scaler_to_serve_with`."""
    group = parser.add_argument_group("workers that a cluster runs (docs/pools.md)")
    group.add_argument(
        "--scale-command", metavar="COMMAND",
        help="run this whenever the number of workers of a role changes, at the start too, instead of starting "
        "processes here; like 'kubectl scale deployment twinpool-{role} --replicas={count}'",
    )  # fmt: skip
    group.add_argument(
        "--scale-timeout", type=float, metavar="SECONDS", help="it is killed when it takes longer (60)"
    )


def scaler_to_serve_with(args: argparse.Namespace) -> MakeScaler:
    """What makes the scaler. Raises ConfigError."""
    if args.scale_command is None:
        if args.scale_timeout is not None:
            raise ConfigError("--scale-timeout is for --scale-command; give that too, or leave it out")
        from twinpool.deploy.host import HostScaler

        return HostScaler
    from twinpool.deploy.command import CommandScaler, ScaleCommand

    return partial(CommandScaler, ScaleCommand.parse(args.scale_command, args.scale_timeout))
