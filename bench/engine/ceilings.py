"""The machine's limits, measured: how fast memory is read, how fast matrices are multiplied, how fast bytes are copied.

Each is the best of what is at hand: several ways are tried once, and the fastest is then used in every round.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from twinpool.bench.engine.floors import Ceilings
from twinpool.bench.engine.timing import CpuTimer, CudaTimer, Run, Timer
from twinpool.kernels.jit import compiled

_LEAST_READ_BYTES = 256 << 20
_MOST_READ_BYTES = 1 << 30
_PAST_CACHE = 4
"""What is read is so many times the last-level cache, so that nearly all of it comes from memory."""
_STREAMS = 6
"""Places that one thread reads at once. Measured on one core, GB/s: 1 place 25, 2 places 24 to 30, 6 places 29 to 32.
"""
_TRIES = 3
"""Of which the best counts: the first after a long step can be a third slower."""
_CPU_PRODUCTS = ((512, 1024, 1024), (1024, 1024, 1024), (512, 2048, 2048))
_GPU_PRODUCTS = ((8192, 8192, 8192), (4096, 4096, 4096))
_GPU_READ_BYTES = 1 << 30
_HUGE_PAGE = 2 << 20


class Limits(Protocol):
    """Measures what one device does at best."""

    def measure(self) -> Ceilings:
        """One round; afterwards the caches hold none of the caller's data."""
        ...


def limits_of(device: torch.device, dtype: torch.dtype, threads: int) -> Limits:
    """The limits of `threads` threads of the CPU, or of a CUDA device, for products of `dtype`."""
    return CudaLimits(device, dtype) if device.type == "cuda" else CpuLimits(dtype, threads)


class CpuLimits:
    """Reading with plain loads from many places at once; multiplying with oneDNN or whatever torch has."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        """Sets torch's threads to `threads`, and chooses."""
        torch.set_num_threads(threads)
        self._timer = CpuTimer()
        size = read_bytes(last_level_cache_bytes())
        memory = _huge_pages(size)
        share = len(memory) // threads // _STREAMS * _STREAMS
        self._shares = [memory[i * share : (i + 1) * share] for i in range(threads)]
        self._num_bytes = threads * share * memory.itemsize
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._read()
        self._product, self._flops = _fastest_product(_cpu_products(dtype), self._timer)

    def measure(self) -> Ceilings:
        """As `Limits.measure`."""
        product_s = min(self._timer.seconds(self._product) for _ in range(_TRIES))
        read_s = min(self._timer.seconds(self._read) for _ in range(_TRIES))
        return Ceilings(self._num_bytes / read_s, self._flops / product_s)

    def _read(self) -> None:
        if self._pool is None:
            _sum(self._shares[0])
        else:
            list(self._pool.map(_sum, self._shares))


class CudaLimits:
    """Reading by a sum, or copying, over a large buffer; multiplying with cuBLAS."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocates twice a gigabyte, and chooses."""
        self._timer = CudaTimer(device)
        source = torch.ones(_GPU_READ_BYTES // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        ways: Sequence[tuple[Run, int]] = (
            (source.sum, _GPU_READ_BYTES),
            (lambda: target.copy_(source), 2 * _GPU_READ_BYTES),
        )
        rates = [num_bytes / _best_s(run, self._timer) for run, num_bytes in ways]
        self._move, self._num_bytes = ways[rates.index(max(rates))]
        products = _gpu_products(dtype, device)
        self._product, self._flops = _fastest_product(products, self._timer)

    def measure(self) -> Ceilings:
        """As `Limits.measure`."""
        product_s = min(self._timer.seconds(self._product) for _ in range(_TRIES))
        move_s = min(self._timer.seconds(self._move) for _ in range(_TRIES))
        return Ceilings(self._num_bytes / move_s, self._flops / product_s)


class Copying:
    """One thread's memcpy of so many bytes, between two buffers that have been touched before."""

    def __init__(self, num_bytes: int) -> None:
        self._source = np.ones(num_bytes, np.uint8)
        self._target = np.zeros(num_bytes, np.uint8)

    def __call__(self) -> None:
        """Copies once."""
        np.copyto(self._target, self._source)


def read_bytes(cache_bytes: int) -> int:
    """How much is read to measure memory beside a last-level cache of `cache_bytes`: whole huge pages."""
    wanted = min(max(_LEAST_READ_BYTES, _PAST_CACHE * cache_bytes), _MOST_READ_BYTES)
    return -(-wanted // _HUGE_PAGE) * _HUGE_PAGE


def last_level_cache_bytes() -> int:
    """The largest cache that the system tells of; 0 if it tells of none."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=0)


def _huge_pages(num_bytes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Touched memory, in huge pages where the system has them: else page walks are measured too."""
    area = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    memory = whole[start : start + num_bytes].view(np.float32)
    memory[:] = 1.0
    return memory


@compiled
def _sum(memory: Any) -> Any:
    size = memory.shape[0] // 6
    a, b, c = memory[:size], memory[size : 2 * size], memory[2 * size : 3 * size]
    d, e, f = memory[3 * size : 4 * size], memory[4 * size : 5 * size], memory[5 * size : 6 * size]
    s0 = s1 = s2 = s3 = s4 = s5 = np.float32(0.0)
    for i in range(size):
        s0 += a[i]
        s1 += b[i]
        s2 += c[i]
        s3 += d[i]
        s4 += e[i]
        s5 += f[i]
    return s0 + s1 + s2 + s3 + s4 + s5


def _cpu_products(dtype: torch.dtype) -> list[tuple[Run, float]]:
    """Ways to multiply, with their FLOPs."""
    onednn: Any = torch.ops.mkldnn
    ways: list[tuple[Run, float]] = []
    for rows, inner, columns in _CPU_PRODUCTS:
        x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        flops = 2.0 * rows * inner * columns
        ways.append((_bound(F.linear, x, weight), flops))
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            packed = onednn._reorder_linear_weight(weight, rows)
            ways.append((_bound(onednn._linear_pointwise, x, packed, None, "none", [], ""), flops))
    return ways


def _gpu_products(dtype: torch.dtype, device: torch.device) -> list[tuple[Run, float]]:
    ways: list[tuple[Run, float]] = []
    for rows, inner, columns in _GPU_PRODUCTS:
        x = torch.randn(rows, inner, device=device).to(dtype)
        weight = torch.randn(columns, inner, device=device).to(dtype)
        ways.append((_bound(F.linear, x, weight), 2.0 * rows * inner * columns))
    return ways


def _bound(function: Callable[..., object], *arguments: object) -> Run:
    return lambda: function(*arguments)


def _fastest_product(ways: Sequence[tuple[Run, float]], timer: Timer) -> tuple[Run, float]:
    rates = [flops / _best_s(run, timer) for run, flops in ways]
    return ways[rates.index(max(rates))]


def _best_s(run: Run, timer: Timer) -> float:
    run()
    return min(timer.seconds(run) for _ in range(_TRIES))
