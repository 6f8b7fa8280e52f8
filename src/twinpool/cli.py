"""The `twinpool` command: `serve`, `worker`, `join-token`, `api-key`, `chat`, `doctor`, `kv-size`, `metrics`, `fetch`,
`bench`, `compare`, `sweep`, `report`, `profile`, `simulate`, `plan`, `pools`.

This module only dispatches; each command is a module of `twinpool.commands` with `add_parser` and `run`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence

from twinpool import __version__
from twinpool.commands.arguments import CommandParser
from twinpool.errors import ConfigError, ModelError, TwinpoolError

COMMANDS = (
    "serve",
    "worker",
    "join_token",
    "api_key",
    "pools",
    "chat",
    "doctor",
    "kv_size",
    "metrics",
    "fetch",
    "bench",
    "compare",
    "sweep",
    "report",
    "profile",
    "simulate",
    "plan",
)


EXIT_NO_READER = 141
"""What a shell says of a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status (2: a setting is wrong, 1: it failed, or its output cannot be written,
    141: nobody reads its output)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        from twinpool.commands.bench import with_part

        arguments = with_part(arguments)
    try:
        args, unknown = _parser(arguments).parse_known_args(arguments)
        if unknown:
            parser: CommandParser = args.parser
            parser.refuse(unknown, getattr(args, "hints", {}))
        status: int = args.run(args)
        sys.stdout.flush()
    except (ConfigError, ModelError) as exc:
        print(f"twinpool: {exc}", file=sys.stderr)
        return 2
    except TwinpoolError as exc:
        print(f"twinpool: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if _is_read(sys.stdout.fileno()):
            raise  # another pipe broke
        _drop_output()
        return EXIT_NO_READER
    except OSError as exc:
        if _takes_output():
            raise  # something else failed
        _drop_output()
        print(
            f"twinpool: standard output cannot be written: {exc.strerror}; send it elsewhere, or make room there",
            file=sys.stderr,
        )
        return 1
    return status


def _takes_output() -> bool:
    """Whether standard output takes an empty line, with all that is left to be written before it."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """What is left goes nowhere: the interpreter flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_read(pipe: int) -> bool:
    """Whether the other end of a pipe is still open; true of what is no pipe."""
    poller = select.poll()
    poller.register(pipe, 0)
    return not any(event & select.POLLERR for _, event in poller.poll(0))


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Knows the command that `arguments` begin with, or if there is none, all: what the others import takes time that a
    server's start need not."""
    parser = CommandParser(
        prog="twinpool",
        description="Serves language models with prefill and decode on two separate pools of workers.",
        epilog="Start with `twinpool serve`; then `twinpool chat` in another terminal.",
    )
    parser.add_argument("--version", action="version", version=f"twinpool {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = arguments[0].replace("-", "_") if arguments else ""
    for name in (named,) if named in COMMANDS else COMMANDS:
        command = importlib.import_module(f"twinpool.commands.{name}")
        subparser: argparse.ArgumentParser = command.add_parser(subparsers)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser
