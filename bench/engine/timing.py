"""Durations on a CPU or a CUDA device, and what several of them say together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], object]
NOISY_SPREAD = 0.15
"""A measurement whose middle half is wider than this part of its median says little: something else was running."""


class Timer(Protocol):
    """Times one run on a device. What the run returns is dropped."""

    def seconds(self, run: Run) -> float:
        """Seconds of one run, its kernels included."""
        ...


class CpuTimer:
    """Wall-clock time on the calling thread."""

    def seconds(self, run: Run) -> float:
        """As `Timer.seconds`."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class CudaTimer:
    """Time between two events on the current stream, from a cold L2 cache: a buffer twice its size is written before.

    A run that ends with a host synchronisation is timed with its host work, one that only launches kernels without.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def seconds(self, run: Run) -> float:
        """As `Timer.seconds`."""
        event: Any = torch.cuda.Event  # torch leaves its constructor untyped
        start, end = event(enable_timing=True), event(enable_timing=True)
        self._flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def timer_for(device: torch.device) -> Timer:
    """The timer of a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def spread(values: Sequence[float]) -> float:
    """The width of the middle half of the values over their median; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle
