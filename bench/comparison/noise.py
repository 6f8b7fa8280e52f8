"""What else the machine did, and how fast it was: recorded around each run, so that a difference can be doubted."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from twinpool.bench.reports.model import Table

OTHERS_SHARE, STOLEN_SHARE = 0.1, 0.03
"""More of all cores, in any run, deserves a warning."""
_CALIBRATION_BYTES = 64 << 20
_REPEATS = 3
_NEAR, _PRODUCTS = 4096, 2000


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one core is right now: reading memory in GB/s, and multiplying floats that lie in its first cache."""

    memory_gbps: float
    arithmetic_gflops: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Of one run, as shares of all cores: what neither the server nor the load generator used, and what the machine
    under this one took. `load_average` is the system's, of the last minute; `pace` was measured just before."""

    others_share: float
    stolen_share: float
    load_average: float
    pace: Pace


def measure_pace() -> Pace:
    """The best of a few tries, about 50 ms in all, on the calling thread."""
    data = np.ones(_CALIBRATION_BYTES // 8, np.float64)
    near, factors = np.ones(_NEAR, np.float32), np.ones(_NEAR, np.float32)

    def multiply() -> None:
        for _ in range(_PRODUCTS):
            np.multiply(near, factors, out=near)

    read_s = min(_timed(data.sum) for _ in range(_REPEATS))
    multiply_s = min(_timed(multiply) for _ in range(_REPEATS))
    return Pace(
        memory_gbps=data.nbytes / read_s / 1e9, arithmetic_gflops=_PRODUCTS * _NEAR / multiply_s / 1e9
    )


class NoiseMeter:
    """Watches the machine from its making until `stop`."""

    def __init__(self) -> None:
        self._pace = measure_pace()
        self._started_at = time.monotonic()
        self._before = psutil.cpu_times()

    def stop(self, own_cpu_s: float) -> Noise:
        """`own_cpu_s`: seconds of CPU that server and load generator used since the start."""
        times, before = psutil.cpu_times(), self._before
        num_cores = psutil.cpu_count() or 1
        total_s = (time.monotonic() - self._started_at) * num_cores
        busy_s = sum(getattr(times, name) - getattr(before, name) for name in ("user", "system", "nice"))
        stolen_s = getattr(times, "steal", 0.0) - getattr(before, "steal", 0.0)
        return Noise(
            others_share=max(0.0, busy_s - own_cpu_s) / total_s,
            stolen_share=stolen_s / total_s,
            load_average=os.getloadavg()[0],
            pace=self._pace,
        )


def noise_table(noises: Mapping[str, Sequence[Noise]]) -> Table:
    """A row for each arm, from its trials; each trial's own noise is in its run's settings."""
    rows = tuple((name, *(f"{value:.3g}" for value in _row(found))) for name, found in noises.items())
    return Table(
        title="What else the machine did",
        columns=(
            "arm", "others' CPU, %", "most in one run, %", "stolen, %", "memory, GB/s", "its spread, %",
            "products, GFLOP/s",
        ),
        rows=rows,
        note="While loads ran, of all cores: what neither the arm's server nor the load generator used (other arms' "
        "idle servers did, and a server that is only a URL). Memory and products: one core's pace right before each "
        "run; if it spreads, so do results.",
    )  # fmt: skip


def noise_warnings(noises: Mapping[str, Sequence[Noise]]) -> list[str]:
    """What should not have been, in words. `noises` are of arms whose servers' own work is known."""
    found = [noise for each in noises.values() for noise in each]
    words = []
    if (share := max((noise.others_share for noise in found), default=0.0)) > OTHERS_SHARE:
        words.append(f"other programs used up to {share:.0%} of the cores while a load ran; end them")
    if (share := max((noise.stolen_share for noise in found), default=0.0)) > STOLEN_SHARE:
        words.append(f"other machines on this host took up to {share:.0%} of the cores while a load ran")
    return words


def _row(found: Sequence[Noise]) -> list[float]:
    memory = [noise.pace.memory_gbps for noise in found]
    middle = statistics.median(memory)
    others = [100 * noise.others_share for noise in found]
    return [
        statistics.fmean(others),
        max(others),
        100 * statistics.fmean(noise.stolen_share for noise in found),
        middle,
        100 * (max(memory) - min(memory)) / middle,
        statistics.median(noise.pace.arithmetic_gflops for noise in found),
    ]


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
