"""Accelerators that need not be here: what their makers' data sheets say they do at best."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from twinpool.errors import ConfigError

GIB = 1 << 30


class Precision(StrEnum):
    """How weights are held, and what their products are computed in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"
    INT4 = "int4"

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight, its share of scales included: fp4 has a scale of 1 byte for 16 weights (NVFP4), int4
        one of 2 bytes for 128 (AWQ, GPTQ)."""
        return _WEIGHT_BYTES[self]


_WEIGHT_BYTES = {
    Precision.FP32: 4.0,
    Precision.BF16: 2.0,
    Precision.FP16: 2.0,
    Precision.FP8: 1.0,
    Precision.INT8: 1.0,
    Precision.FP4: 0.5 + 1 / 16,
    Precision.INT4: 0.5 + 2 / 128,
}
_COMPUTED_IN: Mapping[Precision, tuple[Precision, ...]] = {
    Precision.FP32: (Precision.FP32,),
    Precision.BF16: (Precision.BF16,),
    Precision.FP16: (Precision.BF16,),
    Precision.FP8: (Precision.FP8, Precision.BF16),
    Precision.INT8: (Precision.INT8, Precision.BF16),
    Precision.FP4: (Precision.FP4, Precision.BF16),
    Precision.INT4: (Precision.BF16,),
}
"""Where a device lacks the first, products run in the next one, and only the weights are smaller: activations stay in
16 bits."""
_COMPUTABLE_IN = {
    **_COMPUTED_IN,
    Precision.FP4: (Precision.FP4, Precision.FP8, Precision.INT8, Precision.BF16),
    Precision.INT4: (Precision.INT8, Precision.FP8, Precision.BF16),
}
"""What kernels could do at best, with activations in as few bits as the device can."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. All figures are the most it does: dense FLOP/s, bytes per second in one direction.

    `flops` is by what products are computed in; float16 is as fast as bfloat16 on all of them. `scale_up_bytes_per_s`
    is its link to the others of its node, `scale_out_bytes_per_s` that to other nodes (its share of the network).
    """

    name: str
    title: str
    flops: Mapping[Precision, float]
    bytes_per_s: float
    memory_bytes: int
    scale_up_bytes_per_s: float
    scale_out_bytes_per_s: float
    source: str

    def most_flops_per_s(self, precision: Precision) -> float:
        """Dense FLOP/s of products of weights held as `precision`, whatever the activations are held as; 0 if it has
        no rate for them."""
        return max(
            (self.flops[each] for each in _COMPUTABLE_IN[precision] if each in self.flops), default=0.0
        )

    def flops_per_s(self, precision: Precision) -> float:
        """Dense FLOP/s of products of weights held as `precision`, as engines usually compute them.

        Raises:
            ConfigError: it computes in none of the types that would do.
        """
        for computed in _COMPUTED_IN[precision]:
            if computed in self.flops:
                return self.flops[computed]
        raise ConfigError(
            f"--precision is {precision.value!r}, and {self.title} has no rate for it; allowed: "
            + ", ".join(choice.value for choice in Precision if _runs(choice, self.flops))
        )


def _runs(precision: Precision, flops: Mapping[Precision, float]) -> bool:
    return any(computed in flops for computed in _COMPUTED_IN[precision])


def _tensor_cores(
    bf16: float, *, fp8: float = 0.0, int8: float = 0.0, fp4: float = 0.0, fp32: float
) -> Mapping[Precision, float]:
    """TFLOP/s as data sheets give them, without those that are absent."""
    rates = {
        Precision.BF16: bf16,
        Precision.FP8: fp8,
        Precision.INT8: int8,
        Precision.FP4: fp4,
        Precision.FP32: fp32,
    }
    return {precision: rate * 1e12 for precision, rate in rates.items() if rate}


_DEVICES = (
    Device(
        "h100",
        "H100 SXM",
        _tensor_cores(989.4, fp8=1978.9, int8=1978.9, fp32=66.9),
        3.35e12,
        80 * GIB,
        450e9,
        50e9,
        "NVIDIA H100 Tensor Core GPU data sheet (half of its figures with sparsity); HGX: 400 Gb/s of network each",
    ),
    Device(
        "h200",
        "H200 SXM",
        _tensor_cores(989.4, fp8=1978.9, int8=1978.9, fp32=66.9),
        4.8e12,
        141 * GIB,
        450e9,
        50e9,
        "NVIDIA H200 Tensor Core GPU data sheet (half of its figures with sparsity); HGX: 400 Gb/s of network each",
    ),
    Device(
        "a100",
        "A100 SXM 80 GB",
        _tensor_cores(312.0, int8=624.0, fp32=19.5),
        2.039e12,
        80 * GIB,
        300e9,
        25e9,
        "NVIDIA A100 Tensor Core GPU data sheet; DGX A100: 200 Gb/s of network each",
    ),
    Device(
        "b200",
        "B200 SXM",
        _tensor_cores(2250.0, fp8=4500.0, int8=4500.0, fp4=9000.0, fp32=75.0),
        8.0e12,
        180 * GIB,
        900e9,
        50e9,
        "NVIDIA DGX B200 data sheet, an eighth of it (dense: half of its figures with sparsity); 400 Gb/s each",
    ),
    Device(
        "gb200",
        "GB200 NVL72",
        _tensor_cores(2500.0, fp8=5000.0, int8=5000.0, fp4=10000.0, fp32=80.0),
        8.0e12,
        186 * GIB,
        900e9,
        50e9,
        "NVIDIA GB200 NVL72 data sheet, a 72nd of it (dense: half of its figures with sparsity); 400 Gb/s each",
    ),
    Device(
        "b300",
        "B300 SXM",
        _tensor_cores(2250.0, fp8=4500.0, fp4=13500.0, fp32=75.0),
        8.0e12,
        270 * GIB,
        900e9,
        100e9,
        "NVIDIA HGX B300 data sheet, an eighth of it (dense); 800 Gb/s each",
    ),
    Device(
        "gb300",
        "GB300 NVL72",
        _tensor_cores(2500.0, fp8=5000.0, fp4=15000.0, fp32=80.0),
        8.0e12,
        279 * GIB,
        900e9,
        100e9,
        "NVIDIA GB300 NVL72 data sheet, a 72nd of it (dense); 800 Gb/s each",
    ),
    Device(
        "mi300x",
        "Instinct MI300X",
        _tensor_cores(1307.4, fp8=2614.9, int8=2614.9, fp32=163.4),
        5.3e12,
        192 * GIB,
        448e9,
        50e9,
        "AMD Instinct MI300X data sheet (dense; 7 Infinity Fabric links of 64 GB/s in each direction); 400 Gb/s each",
    ),
)  # memory: the GB of data sheets are GiB, as nvidia-smi and rocm-smi show within 1 %
DEVICES = {device.name: device for device in _DEVICES}
"""Accelerators by what `--gpu` calls them. Their prices are the user's to say."""
_ALIASES = {
    "a100-80gb": "a100",
    "a100-80gb-sxm": "a100",
    "a100-sxm": "a100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
}


def device_named(text: str) -> Device:
    """The accelerator that a user means; case, blanks and underscores do not matter.

    Raises:
        ConfigError: there is none of that name.
    """
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    name = _ALIASES.get(name, name)
    if name not in DEVICES:
        raise ConfigError(f"--gpu is {text!r}; allowed: {', '.join(DEVICES)} (or cpu, which is measured)")
    return DEVICES[name]
