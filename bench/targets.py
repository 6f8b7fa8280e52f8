"""All targets of speed in one table: what is reached, what is wanted, and what binds.

    python -m twinpool.bench.targets [--only engine,isolation,makespan,hybrid,costs] [--json FILE]

Runs `twinpool bench engine` for the parts of the engine, and each program that serves, one after the other; nothing
else should run meanwhile. Exit status: 0 every target is reached, 1 one is not, 2 a program failed or a flag is wrong,
130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinpool.bench import costs, isolation, makespan
from twinpool.bench.limits import EngineFigures, LimitsUnknown
from twinpool.bench.program import EXIT_BROKEN, EXIT_HELD, EXIT_INTERRUPTED, EXIT_WRONG
from twinpool.bench.server_under_test import BUSY

_END_LIMIT_S = 60.0
_WIDTH = 130


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table. `unit` is "×" for a ratio."""

    work: str
    floor: str
    reached: float
    most: float
    unit: str
    binds: str

    @property
    def is_reached(self) -> bool:
        """Whether it is good enough."""
        return self.reached <= self.most


class ProgramFailed(Exception):
    """A program gave no report; its own words are above."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the programs and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), metavar="LIST", help="some of %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as JSON too")
    args = parser.parse_args(argv)
    chosen = [name for name in args.only.split(",") if name]
    if unknown := [name for name in chosen if name not in PROGRAMS]:
        parser.error(f"--only has {', '.join(unknown)}; allowed: {', '.join(PROGRAMS)}")
    found: list[Target] = []
    status = EXIT_HELD
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in chosen:
                found += PROGRAMS[name](Path(folder))
        except (ProgramFailed, LimitsUnknown) as exc:
            print(f"{name}: {exc}", file=sys.stderr)
            status = EXIT_WRONG
        except KeyboardInterrupt:
            status = EXIT_INTERRUPTED
    _print(found)
    if args.json is not None:
        rows = [{**asdict(target), "is_reached": target.is_reached} for target in found]
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if status == EXIT_HELD and not all(target.is_reached for target in found):
        return EXIT_BROKEN
    return status


def _engine(folder: Path) -> list[Target]:
    report = _engine_report(folder, "prefill,decode,transfer")
    wanted = (
        ("one stream, decode step, context 512", "decode: batch 1, context 512", 1.4),
        ("batch 32, context 300, decode step", "decode: batch 32, context 300", 1.5),
        ("prefill 512 tokens", "prefill: 512 tokens", 1.35),
        ("prefill 2,048 tokens", "prefill: 2048 tokens", 1.35),
        ("KV of 1,024 tokens, shm", "transfer: shm, 1024 tokens", 1.3),
        ("KV of 1,024 tokens, ucx", "transfer: ucx, 1024 tokens", 1.5),
    )
    return [
        Target(work, report.floors[key], report.ratios[key], most, "×", _limit_of(report.floors[key]))
        for work, key, most in wanted
        if key in report.ratios
    ]


def _isolation(folder: Path) -> list[Target]:
    figures = _report(folder, "isolation")
    binds = _busiest(figures[BUSY])
    every_s = figures["seconds between prompts"]
    return [
        Target(
            f"8 streams, a 2,048-token prompt every {every_s:.1f} s: p99 ITL",
            "their p50 without prompts",
            figures["p99 ITL, times p50 without prompts"],
            isolation.MOST_ITL,
            "×",
            binds,
        ),
        Target(
            "those prompts' TTFT",
            "prefill alone",
            figures["TTFT, times prefill alone"],
            isolation.MOST_TTFT,
            "×",
            binds,
        ),
    ]


def _makespan(folder: Path) -> list[Target]:
    return [_makespan_of(folder, "", ())]


def _hybrid(folder: Path) -> list[Target]:
    serve = ("--serve", "--prefill 1 --decode 1 --hybrid")
    return [_makespan_of(folder, ", --hybrid", serve)]


def _makespan_of(folder: Path, how: str, arguments: Sequence[str]) -> Target:
    figures = _report(folder, "makespan", *arguments, *_limits(folder))
    return Target(
        f"32 × (256 in, 64 out) at once, makespan{how}",
        "floor of all cores",
        figures["times the floor"],
        makespan.MOST_TIMES,
        "×",
        _busiest(figures[BUSY]),
    )


def _costs(folder: Path) -> list[Target]:
    figures = _report(folder, "costs", *_limits(folder))
    token_us, memory_mb = figures["coordinator CPU per token (µs)"], figures["most of it (MB)"]
    return [
        Target(
            "coordinator, per token of 64 streams",
            "",
            token_us,
            costs.MOST_TOKEN_S * 1e6,
            "µs",
            f"a send per token: {figures['a send beside the streams (µs)']:.0f} µs",
        ),
        Target(
            "ready to serve, cached model",
            "",
            figures["ready (s)"],
            costs.MOST_READY_S,
            "s",
            "imports, weights",
        ),
        Target(
            "memory per worker beyond weights and KV",
            "",
            memory_mb,
            costs.MOST_MEMORY_BYTES / 1e6,
            "MB",
            "torch, mapped weights",
        ),
    ]


PROGRAMS: dict[str, Callable[[Path], list[Target]]] = {
    "engine": _engine,
    "isolation": _isolation,
    "makespan": _makespan,
    "hybrid": _hybrid,
    "costs": _costs,
}


def _limits(folder: Path) -> tuple[str, str]:
    """The flag that hands on the ceilings; measured now, if not before."""
    file = folder / "engine.json"
    if not file.exists():
        _engine_report(folder, "ceilings")
    return ("--limits", str(file))


def _engine_report(folder: Path, groups: str) -> EngineFigures:
    file = folder / "engine.json"
    _run(("-m", "twinpool", "bench", "engine", "--only", groups, "--json", str(file)), (EXIT_HELD,))
    return EngineFigures.read(file.read_text(encoding="utf-8"))


def _report(folder: Path, name: str, *arguments: str) -> Mapping[str, Any]:
    """The figures of a program that serves. A promise that is broken is no failure: the table says so."""
    file = folder / f"{name}.json"
    _run(("-m", f"twinpool.bench.{name}", "--json", str(file), *arguments), (EXIT_HELD, EXIT_BROKEN))
    figures: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["figures"]
    return figures


def _run(arguments: Sequence[str], good: Sequence[int]) -> None:
    """Raises ProgramFailed. After Ctrl-C, which the program gets too, waits until it has stopped its server."""
    with subprocess.Popen([sys.executable, *arguments]) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)
            process.kill()
            raise
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if status not in good:
        raise ProgramFailed(f"{' '.join(arguments[:3])} ended with status {status}")


def _limit_of(floor: str) -> str:
    """What sets the floor of an operation, in words."""
    known = {"memory": "bandwidth of memory", "arithmetic": "rate of matrix products"}
    return known.get(floor, "copying between two processes")


def _busiest(shares: Mapping[str, float]) -> str:
    """The two busiest processes, each beside what it used of one core."""
    busiest = sorted(shares.items(), key=lambda item: item[1], reverse=True)[:2]
    return ", ".join(f"{name} {share:.0%} of a core" for name, share in busiest)


def _print(targets: Sequence[Target]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Targets", title_justify="left")
    for name in ("work", "beside", "reached", "wanted", "", "binds"):
        is_short = name in ("reached", "wanted", "")
        table.add_column(name, justify="right" if name in ("reached", "wanted") else "left", no_wrap=is_short)
    for target in targets:
        digits = 2 if target.unit == "×" else 1
        reached = f"{target.reached:.{digits}f} {target.unit}"
        wanted = f"≤ {target.most:g} {target.unit}"
        verdict = "reached" if target.is_reached else "NOT YET"
        table.add_row(target.work, target.floor, reached, wanted, verdict, target.binds)
    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
