"""`twinpool profile`: measures a worker of this machine and fits the latency model that the planner predicts with."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.commands.comparing import ends_like_ctrl_c
from twinpool.commands.cuda_here import check_devices, why_no_cuda
from twinpool.config import EngineConfig, require
from twinpool.coordinator.launch import usable_cores

if TYPE_CHECKING:
    from rich.table import Table

    from twinpool.planner.profile.saved import Profile

EXIT_GOOD, EXIT_FAR_OFF = 0, 3
_WIDTH = 120
"""Columns of a table where there is no terminal to tell."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's worker, for `twinpool simulate` and `twinpool plan`",
        description="Measures a worker of this machine: steps of its engine by what is in them, alone and beside a "
        "neighbour, transfers of KV, and what a server adds; fits a latency model and writes both to a file. "
        "Nothing else should run meanwhile.",
        epilog="Exit status: 0; 2 a setting is wrong; 3 the fit is far off somewhere, which is told and in the file; "
        "1 a part failed; 130 Ctrl-C or SIGTERM (nothing is written).",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face id, directory or .gguf file (default: the built-in SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer shapes and rounds: about one minute, not three"
    )
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="as `twinpool serve` takes it")
    parser.add_argument("--weights", default="auto", metavar="NAME", help="likewise")
    parser.add_argument("--device", default="auto", metavar="NAME", help="likewise")
    parser.add_argument(
        "--threads", type=int, metavar="N",
        help="CPU threads of the worker (default: half of the cores, as of one prefill and one decode worker; all of "
        "them for one colocated worker)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path("profile.json"), metavar="FILE", help="default: ./%(default)s"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measures, prints, writes.

    Raises:
        ConfigError, ModelError, TransferError, ServerFault: as `planner.profile.measure.measure`.
        ConfigError: the file cannot be written; it is looked at first.
    """
    cores = usable_cores()
    threads = max(1, len(cores) // 2) if args.threads is None else args.threads
    EngineConfig("", args.dtype, args.device, threads=threads, weights=args.weights)
    require("--threads", threads, threads <= len(cores), f"1 to {len(cores)}, the cores of this process")
    path: Path = args.output
    folder = path.absolute().parent
    can_write = folder.is_dir() and not path.is_dir() and os.access(folder, os.W_OK)
    require("--output", str(path), can_write, "a file in a folder that exists and can be written to")
    device = args.device
    if device == "auto":
        device = "cpu" if why_no_cuda() else "cuda"
    check_devices("--device", [device], "auto")
    from twinpool.commands.dataset_flags import load_tokenizer
    from twinpool.engine.model_files import resolve
    from twinpool.planner.profile.fit import far_off
    from twinpool.planner.profile.measure import ProfileSettings, measure
    from twinpool.planner.profile.saved import save_profile

    model = resolve(args.model)
    settings = ProfileSettings(
        directory=model.path, model=model.name, asked=args.model, tokenizer=load_tokenizer(args.model),
        dtype=args.dtype, weights=args.weights, device=device, threads=threads, is_quick=args.quick,
    )  # fmt: skip
    with ends_like_ctrl_c():
        profile = measure(settings, _said)
    try:
        save_profile(profile, path)
    finally:  # a full disk does not make minutes of measuring worthless
        _show(profile)
    print(f"written: {path}; use it as --profile {path}")
    return EXIT_FAR_OFF if far_off(profile.residuals) else EXIT_GOOD


def _said(line: str) -> None:
    """To who waits: standard output is the result's."""
    print(line, file=sys.stderr, flush=True)


def _show(profile: Profile) -> None:
    from rich.console import Console

    from twinpool.planner.profile.words import model_table, residual_table

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    tables: tuple[Table, ...] = (model_table(profile), residual_table(profile))
    for table in tables:
        console.print(table)
    for warning in profile.warnings:
        console.print(f"WARNING: {warning}", markup=False, soft_wrap=True)
