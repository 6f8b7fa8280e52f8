"""How long a worker's model takes from nothing to ready: in processes of their own, with all kernels compiled before.

`python -m twinpool.bench.engine.cold_start MODEL_DIR DTYPE DEVICE THREADS` is one such process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from twinpool.bench.engine.measuring import Bench
from twinpool.bench.engine.model_bed import load_runner
from twinpool.bench.engine.report import Measurement
from twinpool.errors import ModelError

_LIMIT_S = 120.0
_PARTS = {"imports_s": "interpreter and imports", "load_s": "weights and pool", "warm_up_s": "warm-up"}


def cold_start(bench: Bench, directory: Path, dtype: str, device: str, threads: int, rounds: int) -> None:
    """Measures the parts, and the whole from the start of the process to its end.

    Raises:
        ModelError: a process failed, its own words say why; or it took too long.
    """
    found: dict[str, list[float]] = {name: [] for name in ("process", *_PARTS.values())}
    command = [sys.executable, "-m", __name__, str(directory), dtype, device, str(threads)]
    for _ in range(rounds):
        started = time.perf_counter()
        try:
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired as exc:
            raise ModelError(f"a cold start did not end within {_LIMIT_S:.0f} s") from exc
        found["process"].append(time.perf_counter() - started)
        if child.returncode:
            raise ModelError(f"a cold start ended with status {child.returncode}; its error is above")
        for field, seconds in json.loads(child.stdout).items():
            found[_PARTS[field]].append(seconds)
    for name, seconds in found.items():
        bench.found(Measurement("start", name, tuple(seconds)))


def main(arguments: Sequence[str]) -> None:
    """One start; prints the seconds of its parts as JSON."""
    imports_s = time.time() - psutil.Process().create_time()
    imported = time.perf_counter()
    directory, dtype, device, threads = arguments
    runner = load_runner(Path(directory), dtype, device, int(threads), 0)
    loaded = time.perf_counter()
    runner.warm_up()
    warm = time.perf_counter()
    parts = {"imports_s": imports_s, "load_s": loaded - imported, "warm_up_s": warm - loaded}
    print(json.dumps(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
