"""The device that tests/gpu runs on. Importing this skips the importing file where there is none.

A rehearsal runs the same lines on a CPU, at small sizes: what only a GPU can show (that nothing waits, that nothing
comes too early) is then left out, and Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch

IS_REHEARSAL = os.environ.get("TWINPOOL_GPU_REHEARSAL") == "1"
if not torch.cuda.is_available() and not IS_REHEARSAL:
    pytest.skip(
        "no CUDA device; bench/gpu.sh runs these tests on a machine with one", allow_module_level=True
    )
if IS_REHEARSAL:
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cpu" if IS_REHEARSAL else "cuda")
_SLOW_CYCLES = 40_000_000


def slow_kernel() -> None:
    """Keeps the device busy for some 20 ms, and the host not at all."""
    if not IS_REHEARSAL:
        torch.cuda._sleep(_SLOW_CYCLES)
