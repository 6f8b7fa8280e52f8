"""This machine's processor as a device: what is measured becomes the roofline's figures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from twinpool.bench.engine import ceilings
from twinpool.bench.engine.floors import Ceilings
from twinpool.errors import ConfigError
from twinpool.planner.step_shape import of_sequences
from twinpool.planner.times.devices import Precision
from twinpool.planner.times.model_shapes import SHAPES
from twinpool.planner.times.registry import roofline
from twinpool.planner.times.this_machine import this_cpu


class Limits:
    """A machine of 20 GB/s, and 100 GFLOP/s in float32, four times that in bfloat16."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self._flops_per_s = 100e9 * threads * (4 if dtype is torch.bfloat16 else 1)

    def measure(self) -> Ceilings:
        return Ceilings(20e9, self._flops_per_s)


@pytest.fixture(autouse=True)
def made_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ceilings, "CpuLimits", Limits)
    this_cpu.cache_clear()
    yield
    this_cpu.cache_clear()


def test_a_processor_is_as_fast_as_it_was_measured() -> None:
    times = roofline("cpu", SHAPES["smollm2-135m"])
    assert times.device.flops == {Precision.FP32: 100e9, Precision.BF16: 400e9}
    weights = SHAPES["smollm2-135m"].shared_weights + SHAPES["smollm2-135m"].head_weights
    assert times.floor_s(of_sequences([1])) == pytest.approx(2 * weights / 20e9, rel=1e-3)
    assert times.device.scale_out_bytes_per_s > 0
    assert times.name == "smollm2-135m in bf16 on 1 × 1 thread of this CPU, roofline"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cpu:0", r"--times cpu:THREADS is 0; allowed: 1 to"),
        ("cpu:many", r"--times has 'cpu:many'; allowed: cpu, or"),
    ],
)
def test_threads_that_are_not_there_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roofline(spec, SHAPES["smollm2-135m"])
