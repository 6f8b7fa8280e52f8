"""`twinpool worker`: one worker process. `twinpool serve` starts its own; further hosts start theirs by hand."""

from __future__ import annotations

import argparse
import os
import platform
import re
from typing import TYPE_CHECKING

from twinpool import collector
from twinpool.commands.flags import (
    add_worker_flags,
    engine_config,
    one_of,
    parse_cores,
    scheduler_config,
    transfer_config,
)
from twinpool.commands.join_token import add_join_token_flag, token_to_join_with
from twinpool.config import LinkConfig, Role, WorkerConfig
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.worker.main import CoreFactory

_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""oneDNN, and torch in front of it, keep what they compiled for each matrix shape, and every prompt length is a new
one. Their 1,024 entries grow to hundreds of MB (2.6 MB per length with SmolLM2-135M); with these, both together stop at
some 90 MB, and steps take as long. What the user has set wins."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "worker",
        help="run one worker for a coordinator that runs already",
        description="Runs one prefill, decode or colocated worker and joins it to a coordinator.",
    )
    parser.add_argument(
        "--role",
        required=True,
        type=one_of(*Role),
        metavar="ROLE",
        help="prefill, decode or colocated",
    )
    parser.add_argument(
        "--connect",
        required=True,
        metavar="ADDRESS",
        help="the coordinator's control address, like tcp://10.0.0.1:7000",
    )
    parser.add_argument(
        "--model-dir",
        required=True,
        metavar="DIR",
        help="directory with config.json and safetensors (`twinpool serve` prints the one it serves)",
    )
    parser.add_argument(
        "--id",
        metavar="NAME",
        help="name of the worker, unique in its server (default: role, host and process id)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="CPU threads of the model (default 1)"
    )
    parser.add_argument(
        "--cores", default="", metavar="LIST", help="CPU cores to stay on, like 0,1 (default: any)"
    )
    parser.add_argument(
        "--deployment",
        default="local",
        metavar="NAME",
        help="name of the server that it belongs to (default local)",
    )
    parser.add_argument(
        "--workers-on-host",
        type=int,
        default=1,
        metavar="N",
        help="workers that share this host's memory (default 1)",
    )
    parser.add_argument(
        "--workers-on-device",
        type=int,
        default=1,
        metavar="N",
        help="those of them that share this one's GPU (default 1)",
    )
    add_join_token_flag(parser)
    parser.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    add_worker_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the worker until it is told to stop."""
    worker_id = args.id or default_id(args.role, platform.node(), os.getpid())
    if args.hybrid and args.role is Role.COLOCATED:
        raise ConfigError("--hybrid is for --role prefill and decode: colocated workers do both already")
    config = WorkerConfig(
        role=args.role,
        link=LinkConfig(
            coordinator=args.connect,
            worker_id=worker_id,
            join_token=token_to_join_with(args),
            lifeline_fd=args.lifeline_fd,
        ),
        engine=engine_config(
            args,
            args.model_dir,
            args.threads,
            parse_cores(args.cores),
            workers_on_host=args.workers_on_host,
            workers_on_device=args.workers_on_device,
        ),
        scheduler=scheduler_config(args),
        transfer=transfer_config(args, args.deployment),
        strict=args.strict,
    )
    for name, capacity in _KERNEL_CACHES.items():
        os.environ.setdefault(name, capacity)
    collector.put_off()
    # These import torch: not before the settings are known to be right.
    from twinpool.worker.main import run_worker

    return run_worker(config, lambda role: _core_factory(config, role))


def default_id(role: Role, host: str, pid: int) -> str:
    """A name that no other worker has: of the host too, because in containers all first processes have one number.

    Shared-memory files are named after workers, so nothing is in it but letters, digits, - and _.
    """
    return f"{role}-{re.sub(r'[^A-Za-z0-9_]', '-', host)}-{pid}"


def _core_factory(config: WorkerConfig, role: Role) -> CoreFactory:
    scheduler = config.scheduler
    match role:
        case Role.PREFILL if scheduler.hybrid:
            from twinpool.colocated_pool.hybrid import HybridPrefillCore

            return lambda blocks, layout, fingerprint, _: HybridPrefillCore(
                blocks, layout, fingerprint, scheduler
            )
        case Role.DECODE if scheduler.hybrid:
            from twinpool.colocated_pool.hybrid import HybridDecodeCore

            return lambda blocks, layout, fingerprint, incarnation: HybridDecodeCore(
                blocks, layout, fingerprint, scheduler, incarnation
            )
        case Role.PREFILL:
            from twinpool.prefill_pool.core import PrefillCore

            return lambda blocks, layout, fingerprint, _: PrefillCore(blocks, layout, fingerprint, scheduler)
        case Role.DECODE:
            from twinpool.decode_pool.core import DecodeCore

            return lambda blocks, layout, fingerprint, incarnation: DecodeCore(
                blocks, layout, fingerprint, scheduler, incarnation, config.strict
            )
        case Role.COLOCATED:
            from twinpool.colocated_pool.core import ColocatedCore

            return lambda blocks, layout, _, __: ColocatedCore(blocks, layout, scheduler)
