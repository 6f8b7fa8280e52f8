"""Proves predictions: the same requests through real servers of this machine and through the simulator.

    python -m twinpool.planner.accuracy --measure FOLDER              some 90 minutes on a quiet machine
    python -m twinpool.planner.accuracy --predict FOLDER [--output docs/accuracy.md]

The first sends twelve combinations of workload and layout, two rates each, several times, with the bench's load
generator, profiles this machine's workers around each load, and keeps everything in FOLDER at once: started again after
an interruption, it measures what is missing. The second needs no quiet machine: it simulates the same requests with the
profiles in FOLDER and prints how far its predictions are off; beside it, how far runs of the same requests are apart.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from twinpool.config import require
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.planner.accuracy.comparing import errors_of, summary, table
from twinpool.planner.accuracy.folder import Folder
from twinpool.planner.accuracy.layouts import LAYOUTS
from twinpool.planner.accuracy.loads import loads_of
from twinpool.planner.accuracy.predicting import compare_all
from twinpool.planner.accuracy.report import measured_section, renewed

EXIT_MET, EXIT_FAILED, EXIT_SETTING, EXIT_NOT_MET, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status (0: the targets are met, 3: they are not)."""
    parser = argparse.ArgumentParser(
        prog="python -m twinpool.planner.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as `twinpool serve` takes it")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="measure into it")
    parser.add_argument("--predict", type=Path, metavar="FOLDER", help="predict what was measured into it")
    parser.add_argument("--seconds", type=float, default=8.5, metavar="S", help="of each load (8.5)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is random (1)")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=7,
        metavar="N",
        help="how often each load is sent (7; to 1P1D and colocated whole twice as often)",
    )
    parser.add_argument("--quick", action="store_true", help="quick profiles: for trying it out")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help='measure runs whose "layout, load" has these words'
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="renew the measured part of this document"
    )
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends its servers and engines then, too
    try:
        if args.measure is None and args.predict is None:
            raise ConfigError("nothing to do: give --measure FOLDER, --predict FOLDER, or both")
        require("--seconds", args.seconds, args.seconds > 0, "above 0")
        require("--repetitions", args.repetitions, args.repetitions > 0, "1 or more")
        if args.measure is not None:
            _measure(args, shlex.join(["python", "-m", "twinpool.planner.accuracy", *(argv or sys.argv[1:])]))
        return EXIT_MET if args.predict is None else _predict(args.predict, args.output)
    except ConfigError as exc:
        print(f"accuracy: {exc}", file=sys.stderr)
        return EXIT_SETTING
    except TwinpoolError as exc:
        print(f"accuracy: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _measure(args: argparse.Namespace, command: str) -> None:
    from twinpool.planner.accuracy.measuring import Wanted, measure_all

    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {line}", file=sys.stderr, flush=True)

    wanted = Wanted(
        args.model, args.seconds, args.seed, args.repetitions, command, is_quick=args.quick, only=args.only
    )
    measure_all(Folder(args.measure), wanted, say)


def _predict(path: Path, output: Path | None) -> int:
    folder = Folder(path)
    facts = folder.facts()
    loads = loads_of(facts)
    compared = list(compare_all(folder))
    if not compared:
        raise ConfigError(f"--predict is {str(path)!r}, which has no runs; make them with --measure")
    print("\n".join([*summary(compared), "", *table(compared)]))
    if output is not None:
        runs = [
            run
            for layout in LAYOUTS
            for load in loads
            for run, _ in folder.runs(layout.name, load.name, layout.repetitions(facts.repetitions))
        ]
        text = output.read_text(encoding="utf-8") if output.exists() else "# How well predictions hold\n"
        output.write_text(renewed(text, measured_section(facts, loads, runs, compared)), encoding="utf-8")
    found = errors_of(compared)
    return EXIT_MET if found.are_within_targets else EXIT_NOT_MET


if __name__ == "__main__":
    sys.exit(main())
