"""`twinpool bench`: a server under load (`serve`, which need not be said), or the engine by itself (`engine`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from twinpool.commands import bench_engine, bench_serve

_HELP = ("-h", "--help")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a server under load, or the engine beside this machine's limits",
        description="`twinpool bench FLAGS` is `twinpool bench serve FLAGS`: load on any OpenAI-compatible server. "
        "`twinpool bench engine` measures the engine beside this machine's limits. Each part has its own --help.",
    )
    parts = parser.add_subparsers(title="what to measure", metavar="PART", required=True, dest="part")
    bench_serve.add_part(parts)
    bench_engine.add_part(parts)
    return parser


def run(args: argparse.Namespace) -> int:
    """Never called: the parts run themselves."""
    raise AssertionError(f"no part of bench runs {args.part!r}")


def with_part(arguments: Sequence[str]) -> list[str]:
    """The command line with `serve` filled in where `bench` is followed by flags or nothing."""
    first, *rest = arguments or ("",)
    if first == "bench" and (not rest or (rest[0].startswith("-") and rest[0] not in _HELP)):
        return ["bench", "serve", *rest]
    return list(arguments)
