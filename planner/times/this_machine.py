"""The processor that this runs on, as a device for the roofline: measured, in a few seconds."""

from __future__ import annotations

from functools import cache

import psutil

from twinpool.config import require
from twinpool.planner.times.devices import Device, Precision

_COPIED_BYTES = 16 << 20
_TRIES = 5


@cache
def this_cpu(num_threads: int) -> Device:
    """One worker of so many threads, measured once in a process.

    Products in float32 and bfloat16 and reading memory as `bench.engine.ceilings` measures them; as its link the rate
    at which one thread copies, which is the most that shared memory can do.

    Raises:
        ConfigError: there are not so many cores.
    """
    cores = psutil.cpu_count() or 1
    require(
        "--times cpu:THREADS", num_threads, 1 <= num_threads <= cores, f"1 to {cores}, this machine's cores"
    )
    import torch

    from twinpool.bench.engine.ceilings import Copying, CpuLimits
    from twinpool.bench.engine.timing import CpuTimer

    threads_before = torch.get_num_threads()
    try:
        wide = CpuLimits(torch.float32, num_threads).measure()
        narrow = CpuLimits(torch.bfloat16, num_threads).measure()
    finally:
        torch.set_num_threads(threads_before)
    copying, timer = Copying(_COPIED_BYTES), CpuTimer()
    copied_per_s = _COPIED_BYTES / min(timer.seconds(copying) for _ in range(_TRIES))
    return Device(
        name="cpu",
        title=f"{num_threads} threads of this CPU" if num_threads > 1 else "1 thread of this CPU",
        flops={Precision.FP32: wide.flops_per_s, Precision.BF16: narrow.flops_per_s},
        bytes_per_s=max(wide.bytes_per_s, narrow.bytes_per_s),
        memory_bytes=psutil.virtual_memory().total,
        scale_up_bytes_per_s=copied_per_s,
        scale_out_bytes_per_s=copied_per_s,
        source="measured here, as `twinpool bench engine` measures ceilings",
    )
