"""What the programs that prove a promise have in common: flags, a server to prove it on, a report, an exit status.

Exit status: 0, every promise held; 1, one was broken; 2, a wrong flag or no server; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from twinpool.bench.server_under_test import ServerUnderTest
from twinpool.errors import TwinpoolError

EXIT_HELD, EXIT_BROKEN, EXIT_WRONG, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, whether it held, and what was found."""

    promise: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a program found. `figures` are JSON values by what they are."""

    title: str
    figures: Mapping[str, Any]
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether every promise held."""
        return all(check.holds for check in self.checks)

    def text(self) -> str:
        """For people."""
        lines = ["", self.title, ""]
        for name, value in self.figures.items():
            if isinstance(value, Mapping):
                lines.append(f"  {name}")
                lines += [f"    {inner:<32} {_shown(of)}" for inner, of in value.items()] or ["    none"]
            else:
                lines.append(f"  {name:<34} {_shown(value)}")
        lines.append("")
        for check in self.checks:
            lines.append(f"  {'held  ' if check.holds else 'BROKEN'}  {check.promise}: {check.found}")
        num_broken = sum(not check.holds for check in self.checks)
        lines += [
            "",
            f"{num_broken} of {len(self.checks)} promises broken" if num_broken else "all promises held",
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """For programs."""
        checks = [{"promise": c.promise, "holds": c.holds, "found": c.found} for c in self.checks]
        values = {"title": self.title, "holds": self.holds, "checks": checks, "figures": self.figures}
        return json.dumps(_finite(values), indent=2, allow_nan=False)


Prove = Callable[[argparse.Namespace, ServerUnderTest], Awaitable[Report]]


def parser(description: str, serve_arguments: str) -> argparse.ArgumentParser:
    """A parser with the flags of every program. `serve_arguments` are how its own server is started by default."""
    made = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 every promise held, 1 one was broken, 2 wrong flag or no server, 130 Ctrl-C.",
    )
    made.add_argument("--url", help="prove it on this running server of this machine (default: start one)")
    made.add_argument("--api-key", metavar="KEY", help="the key for --url")
    made.add_argument(
        "--serve",
        default=serve_arguments,
        metavar="ARGS",
        help="how to start the server: what follows `twinpool serve` (default: %(default)r)",
    )
    made.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="where a server started here writes its log (default: a temporary file, deleted if every promise holds)",
    )
    made.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is random (default 1)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the report there as JSON too")
    return made


def positive(text: str) -> float:
    """A flag's type: a number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number above 0")
    return value


def count(text: str) -> int:
    """A flag's type: a whole number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 or more")
    return value


def run(prove: Prove, args: argparse.Namespace) -> int:
    """Runs `prove` on a server that is ready, prints its report, stops the server if it was started here.

    Returns the exit status.
    """
    return status_of(_prove(prove, args), args)


def status_of(proving: Coroutine[Any, Any, Report], args: argparse.Namespace) -> int:
    """Runs `proving`, prints its report, and writes it to `args.json` if that is given. Returns the exit status."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            report = loop.run(proving)
    except TwinpoolError as exc:
        print(exc, file=sys.stderr)
        return EXIT_WRONG
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(report.text())
    if args.json is not None:
        args.json.write_text(report.to_json() + "\n")
    return EXIT_HELD if report.holds else EXIT_BROKEN


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(text, flush=True)


async def _prove(prove: Prove, args: argparse.Namespace) -> Report:
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    if args.url:
        server = ServerUnderTest.attach(args.url, args.api_key)
    else:
        server = ServerUnderTest.start(args.serve.split(), args.log)
        fate = "" if args.log else ", deleted if every promise holds"
        say(f"twinpool serve {args.serve}\nserver log: {server.log_path}{fate}")
    try:
        await server.wait_ready()
        report = await prove(args, server)
    except ExceptionGroup as group:
        if (ours := group.subgroup(TwinpoolError)) is None:
            raise
        raise _first(ours) from group
    finally:
        await server.stop()
    if report.holds and server.log_path is not None and args.log is None:
        server.log_path.unlink()
    return report


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _shown(value: object) -> str:
    match value:
        case float():
            return f"{value:,.3f}"
        case list() | tuple():
            return ", ".join(map(_shown, value)) or "none"
        case _:
            return str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(of) for key, of in value.items()}
        case list() | tuple():
            return [_finite(of) for of in value]
        case bool() | int() | str() | None:
            return value
        case _:
            return str(value)
