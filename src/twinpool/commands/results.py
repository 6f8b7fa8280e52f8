"""How a load's result is asked for, written and told: of `bench serve` and `simulate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.config import require
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.bench.serving.record import Run
    from twinpool.bench.serving.slo import Slo

EXIT_GOOD, EXIT_NO_RESULT, EXIT_INTERRUPTED = 0, 1, 130
DEFAULT_NUM_PROMPTS = 1000


def check_result_flags(args: argparse.Namespace) -> None:
    """First: what is wrong is told before minutes are spent. Raises ConfigError."""
    from twinpool.bench.serving.result import PERCENTILE_METRICS

    percentiles(args.metric_percentiles)
    pairs("--metadata", args.metadata)
    metrics = set(names(args.percentile_metrics))
    allowed = f"names among {', '.join(PERCENTILE_METRICS)}, separated by commas"
    require("--percentile-metrics", args.percentile_metrics, metrics <= set(PERCENTILE_METRICS), allowed)
    folder, name = args.result_dir or Path(), args.result_filename
    require("--result-dir", str(folder), folder.is_dir(), "a folder that exists")
    for flag, file in (
        ("--result-filename", None if name is None else folder / name),
        ("--save-records", args.save_records),
    ):
        is_writable = file is None or (file.absolute().parent.is_dir() and not file.is_dir())
        require(flag, str(file), is_writable, "a file in a folder that exists")


def tell(
    args: argparse.Namespace,
    seen: Run,
    slo: Slo | None,
    accelerators: Mapping[str, int],
    *,
    file: Path | None,
    about: Mapping[str, Any],
    lines: Iterable[str] = (),
    faults: Sequence[str] = (),
) -> int:
    """Writes the records, and the result to `file`, if they are wanted; prints the result, then `lines`. Returns the
    exit status.

    `about` goes into the result's own part; `faults` of the load generator say that it is no result.

    Raises:
        ConfigError: a file cannot be written.
    """
    from twinpool.bench.serving.printed import printed
    from twinpool.bench.serving.record import encode_run
    from twinpool.bench.serving.result import result_json
    from twinpool.bench.serving.summary import WindowKind, summarize, window_of

    if args.save_records is not None:  # first: whatever is said of them, they are all that the load brought
        write(args.save_records, encode_run(seen))
    window, window_fault = window_of(seen, WindowKind(args.window), args.warm_up)
    summary = summarize(seen, slo, window, accelerators=accelerators)
    result = result_json(
        seen,
        summary,
        metadata=pairs("--metadata", args.metadata),
        percentile_metrics=names(args.percentile_metrics),
        metric_percentiles=percentiles(args.metric_percentiles),
        is_detailed=args.save_detailed,
    )
    is_valid = not faults and not window_fault
    result["twinpool"] |= {"is_valid": is_valid, "window_fault": window_fault or None, **about}
    if file is not None:  # before it is printed, as nobody may read that
        write(file, (json.dumps(result) + "\n").encode())
    print(printed(result, seen, summary, faults))
    for line in lines:
        print(line)
    if window_fault:
        print(f"NOT A RESULT: {window_fault}; the figures are of all requests")
    if file is not None:
        print(f"result: {file}")
    if args.save_records is not None:
        print(f"records: {args.save_records}")
    if seen.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_GOOD if is_valid and result["completed"] else EXIT_NO_RESULT


def percentiles(text: str) -> list[float]:
    """Of `--metric-percentiles`. Raises ConfigError."""
    allowed = "numbers from 0 to 100, like 50,90,99"
    try:
        percents = [float(part) for part in names(text)]
    except ValueError as exc:
        raise ConfigError(f"--metric-percentiles is {text!r}; allowed: {allowed}") from exc
    require("--metric-percentiles", text, all(0 <= percent <= 100 for percent in percents), allowed)
    return percents


def names(text: str) -> list[str]:
    """A list that is separated by commas."""
    return [name for name in text.split(",") if name]


def pairs(flag: str, values: list[str]) -> dict[str, str]:
    """KEY=VALUE pairs. Raises ConfigError."""
    for value in values:
        require(flag, value, "=" in value[1:], "pairs like KEY=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in values)}


def accelerators(values: list[str]) -> dict[str, int]:
    """Of `--accelerators`: how many each pool has. Raises ConfigError."""
    found = pairs("--accelerators", values)
    for pool, count in found.items():
        is_good = count.isdecimal() and int(count) >= 1 and pool != "total"
        require("--accelerators", f"{pool}={count}", is_good, "pairs like decode=2, of pools but `total`")
    return {pool: int(count) for pool, count in found.items()}


def check_files(written: Mapping[str, Path | None], read: Mapping[str, str | None]) -> None:
    """What is written by which flag, and read by which. Raises ConfigError if a file is written twice, or read as well,
    or is in no folder."""
    taken = {Path(file).resolve(): flag for flag, file in read.items() if file}
    for flag, file in written.items():
        if file is None:
            continue
        is_writable = file.absolute().parent.is_dir() and not file.is_dir()
        require(flag, str(file), is_writable, "a file in a folder that exists")
        other = taken.setdefault(file.resolve(), flag)
        require(flag, str(file), other == flag, f"a file that {other} does not name")


def write(path: Path, data: bytes) -> None:
    """Raises ConfigError if it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
