"""`twinpool fetch`: get a model ready before it is served."""

from __future__ import annotations

import argparse

from twinpool.engine.model_files import resolve


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "fetch",
        help="fetch and convert a model, so that serving it starts at once",
        description="Fetches and converts a model into the cache and prints the directory it lies in.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face id, directory or .gguf file (default: the built-in SmolLM2-135M-Instruct)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the model's directory."""
    print(resolve(args.model).path)
    return 0
