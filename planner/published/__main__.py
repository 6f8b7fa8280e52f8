"""Published results beside predictions: `python -m twinpool.planner.published --public-data DIR`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from twinpool.errors import ConfigError, TwinpoolError
from twinpool.planner.published import alone, corners, distserve, mooncake
from twinpool.planner.published.figures import Result, table
from twinpool.planner.times.public_data import VARIABLE, folder

PARTS: dict[str, Callable[[Path, int], Iterator[Result]]] = {
    "alone": lambda root, _: alone.results(root),
    "distserve-figure-1": distserve.figure_1,
    "distserve-table-2": distserve.table_2,
    "mooncake": lambda root, _: iter([mooncake.ratios(root)]),
    "taichi": lambda _, count: corners.taichi(count),
    "llm-d": lambda _, count: corners.llm_d(count),
    "mori-io": lambda _, __: corners.mori_io(),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m twinpool.planner.published", description=__doc__)
    parser.add_argument(
        "--public-data", metavar="DIR", help=f"the folder with perf/ and traces/ (default: ${VARIABLE})"
    )
    parser.add_argument("--requests", type=int, default=1_000, metavar="N", help="in each simulated run")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="this part; may be given several times"
    )
    args = parser.parse_args(argv)
    results: list[Result] = []
    try:
        root = folder(args.public_data, os.environ)
        if root is None:
            raise ConfigError(f"--public-data is missing; name the folder, or set {VARIABLE}")
        for name in args.only or PARTS:
            began = time.perf_counter()
            results += PARTS[name](root, args.requests)
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    except TwinpoolError as exc:
        parser.error(str(exc))
    print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
