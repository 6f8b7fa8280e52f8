"""`twinpool fetch`: get a model ready before it is served."""

from __future__ import annotations

import argparse

from twinpool.config import EngineConfig
from twinpool.engine.model_files import resolve
from twinpool.engine.progress import ConsoleProgress


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "fetch",
        help="fetch and convert a model, so that serving it starts at once",
        description="Fetches and converts a model, compiles the kernels, and prints the directory of the model.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face id, directory or .gguf file (default: the built-in SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--weights",
        default="auto",
        metavar="NAME",
        help="compile for these: auto or int8, as given to `twinpool serve` (default auto)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Gets everything ready that serving would otherwise do at its first start; prints the model's directory."""
    EngineConfig("", weights=args.weights)  # a mistake is told before anything is fetched
    with ConsoleProgress() as progress:
        path = resolve(args.model, progress).path
        progress.start("compiling kernels for this machine")
        from twinpool.engine.model_runner import compile_kernels  # imports torch: not for --help

        compile_kernels(path, args.weights)
    print(path)
    return 0
