"""How a Triton kernel is described to the compiler without a GPU and without a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One representative specialisation of a kernel, which `twinpool.kernels.gpu.compile` compiles.

    `label` tells it from the kernel's other variants. `types` gives each runtime argument's type as Triton writes it
    (``*bf16``, ``i32``, ``fp32``), `constants` each `constexpr`'s value; together they name every argument. Pointers
    are taken to be aligned to 16 bytes, as torch allocates; `divisible` names the integers that are multiples of 16.
    Each module of `kernels/gpu` with kernels lists them in `VARIANTS`.
    """

    kernel: Any
    label: str
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
