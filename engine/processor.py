"""This machine's processor, as its system describes it. No torch: `doctor` asks too."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Processor:
    """Its name, and the features that it says it has; none where the system does not tell."""

    name: str
    features: frozenset[str]

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16 natively (x86: AVX512-BF16 or AMX; Arm: the bf16 extension)."""
        return not self.features.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def processor() -> Processor:
    """The one that this process runs on."""
    name, features = platform.processor() or platform.machine(), frozenset[str]()
    for line in _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            features = frozenset(value.split())
        elif key.strip() == "model name":
            name = value.strip()
    return Processor(name, features)
