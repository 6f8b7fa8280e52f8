"""`twinpool bench engine`: measures the engine beside this machine's limits, and compares with a baseline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.bench.engine import CEILINGS, GROUPS
from twinpool.commands.flags import parse_cores
from twinpool.config import EngineConfig, require
from twinpool.coordinator.launch import usable_cores
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.bench.engine.baseline import Baseline
    from twinpool.bench.engine.plan import Settings
    from twinpool.bench.engine.report import EngineReport, Measurement

EXIT_GOOD, EXIT_WORSE, EXIT_NO_BASELINE, EXIT_PART_FAILED, EXIT_INTERRUPTED = 0, 1, 3, 4, 130
FULL_MINUTES, QUICK_MINUTES = 3, 1
_WIDTH = 130
"""Columns of the table where there is no terminal to tell."""


def add_part(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes this part of `twinpool bench`."""
    engine = parts.add_parser(
        "engine",
        help="each operation beside its floor: what the machine's memory and arithmetic allow",
        description="Measures this machine's limits (reading memory, multiplying matrices, copying) and, in the same "
        "run, each part of the engine; prints each beside its floor. Nothing else should run meanwhile.",
        epilog="Exit status: 0; 1 an operation is worse than its baseline; 2 a setting is wrong; 3 there is no "
        "baseline for such a machine (told before anything is measured); 4 a part failed (the others are printed and "
        "written); 130 Ctrl-C (what was found until then is printed and written).",
    )
    engine.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face id, directory or .gguf file (default: the built-in SmolLM2-135M-Instruct)",
    )
    engine.add_argument(
        "--quick", action="store_true", help="fewer sizes and rounds: about a minute, not three"
    )
    engine.add_argument(
        "--only", default="", metavar="LIST", help=f"of {', '.join(GROUPS)}; or {CEILINGS} (default: all)"
    )
    engine.add_argument("--dtype", default="auto", metavar="NAME", help="as `twinpool serve` takes it")
    engine.add_argument("--device", default="auto", metavar="NAME", help="as `twinpool serve` takes it")
    engine.add_argument(
        "--threads", type=int, default=1, metavar="N", help="CPU threads of the model (default 1)"
    )
    engine.add_argument(
        "--cores", default="", metavar="LIST", help="cores to run on (default: the last, as many as threads)"
    )
    engine.add_argument("--json", type=Path, metavar="FILE", help="write everything there, each sample too")
    engine.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline plot (.png, .svg, .pdf)")
    judging = engine.add_mutually_exclusive_group()
    judging.add_argument("--check", type=Path, metavar="FILE", help="compare with the baseline in FILE")
    judging.add_argument(
        "--renew", type=Path, metavar="FILE", help="measure --passes times and write the baseline to FILE"
    )
    engine.add_argument("--passes", type=int, default=3, metavar="N", help="of --renew (default 3)")
    engine.set_defaults(run=run, parser=engine)
    return engine


def run(args: argparse.Namespace) -> int:
    """Measures, prints, writes, judges.

    Raises:
        ConfigError, ModelError, TransferError: as `bench.engine.plan.measure`.
        ConfigError: a file cannot be read or written.
    """
    settings = _settings(args)
    from twinpool.bench.engine import baseline
    from twinpool.bench.engine.plan import measure

    judge = args.renew or args.check
    # First: a broken file is told before minutes are spent.
    known: dict[str, Baseline] = baseline.read(judge) if judge else {}
    if args.check is not None and (reason := _without_baseline(args.check, known, settings.device)):
        print(f"NOT CHECKED: {reason}; make one with `make bench-baseline`", file=sys.stderr)
        return EXIT_NO_BASELINE
    passes = args.passes if args.renew else 1
    _announce(settings, passes)
    reports = [measure(settings, _published, _said) for _ in range(passes)]
    report = reports[-1]
    _show(report)
    if args.json is not None:
        _write(args.json, report.to_json() + "\n")
    if args.plot is not None:
        _plot(args.plot, report)
    if not all(each.is_complete for each in reports):
        return EXIT_INTERRUPTED
    if any(each.failed for each in reports):
        return EXIT_PART_FAILED
    if args.renew is not None:
        return _renew(args.renew, known, reports)
    return EXIT_GOOD if args.check is None else _check(known, report)


def _settings(args: argparse.Namespace) -> Settings:
    only = tuple(name for name in args.only.split(",") if name)
    allowed = f"names among {', '.join((*GROUPS, CEILINGS))}, separated by commas"
    require("--only", args.only, set(only) <= {*GROUPS, CEILINGS}, allowed)
    require("--passes", args.passes, args.passes >= 1, "1 or more")
    for flag, path in (("--json", args.json), ("--plot", args.plot), ("--renew", args.renew)):
        require(
            flag, str(path), path is None or (path.absolute().parent.is_dir() and not path.is_dir()),
            "a file in a folder that exists",
        )  # fmt: skip
    EngineConfig("", args.dtype, args.device, threads=args.threads)
    usable = usable_cores()
    cores = parse_cores(args.cores) or tuple(usable[-args.threads :])
    allowed = "cores among " + ",".join(map(str, usable))
    require("--cores", ",".join(map(str, cores)), set(cores) <= set(usable), allowed)
    others = [core for core in usable if core not in cores]
    from twinpool.bench.engine.plan import Settings
    from twinpool.bench.engine.plot import SUFFIXES
    from twinpool.engine.model_files import resolve

    require(
        "--plot",
        str(args.plot),
        args.plot is None or args.plot.suffix in SUFFIXES,
        f"a name that ends in {', '.join(SUFFIXES)}",
    )
    model = resolve(args.model)
    return Settings(
        directory=model.path,
        model=model.name,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        cores=cores,
        other_core=others[0] if others else None,
        is_quick=args.quick,
        only=only,
    )


def _announce(settings: Settings, passes: int) -> None:
    """What runs now, for how long, and whether the machine is free for it."""
    from twinpool.bench.engine.machine import load_warning

    minutes = passes * (QUICK_MINUTES if settings.is_quick else FULL_MINUTES)
    parts = ", ".join(settings.only or GROUPS)
    _said(
        f"measuring {settings.model}: {parts}; the default model takes {'up to' if settings.only else 'about'} "
        f"{minutes} minute{'' if minutes == 1 else 's'}, the table comes at the end"
    )
    if (warning := load_warning()) is not None:
        _said(warning)


def _published(row: Measurement) -> None:
    """Each result as it comes."""
    from twinpool.bench.engine.report import progress

    _said(progress(row))


def _said(line: str) -> None:
    """To who waits: standard output is the report's."""
    print(line, file=sys.stderr, flush=True)


def _show(report: EngineReport) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if report.measurements:
        console.print(report.table())
    for line in report.words():
        console.print(line, markup=False, soft_wrap=True)


def _plot(path: Path, report: EngineReport) -> None:
    from twinpool.bench.engine.plot import draw

    name, ceilings = next(iter(report.ceilings.items()))
    title = f"{report.settings['what']} on {report.machine['cpu']}"
    draw(path, title, name, ceilings, report.measurements)
    print(f"roofline plot: {path}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--json is {str(path)!r}, which cannot be written: {exc.strerror}") from exc


def _renew(path: Path, known: dict[str, Baseline], reports: list[EngineReport]) -> int:
    from twinpool.bench.engine import baseline

    machine = reports[-1].machine["class"]
    known[machine] = baseline.made_of(reports)
    baseline.write(path, known)
    print(f"{path}: {len(known[machine])} ratios of {len(reports)} runs for {machine!r}")
    return EXIT_GOOD


def _without_baseline(path: Path, known: dict[str, Baseline], device: str) -> str:
    """Why a run on this machine could not be compared with the file at `path`; empty if it can."""
    from twinpool.bench.engine.machine import machine_class
    from twinpool.engine.model_runner import resolve_device

    if not path.exists():
        return f"there is no file {path}"
    machine = machine_class(resolve_device(device))
    return "" if known.get(machine) else f"{path} has no baseline for {machine!r}"


def _check(known: dict[str, Baseline], report: EngineReport) -> int:
    from twinpool.bench.engine import baseline

    machine = report.machine["class"]
    compared = baseline.compare(report, known[machine])
    worse = [each for each in compared if each.is_worse]
    for each in worse:
        print(f"WORSE  {each}")
    undecided = [each for each in compared if each.is_undecided]
    for each in undecided:
        print(f"NOT JUDGED (noisy)  {each}")
    if undecided:
        print(f"{len(undecided)} of {len(compared)} operations are not judged (noisy): measure again")
    print(f"{len(worse)} of {len(compared)} operations are worse than their baseline for {machine!r}")
    return EXIT_WORSE if worse else EXIT_GOOD
