"""What else the machine did, and how fast it was: recorded around each run, so that a difference can be doubted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil

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


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
