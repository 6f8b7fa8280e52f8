"""Layouts as people write them: 2P3D, 4xcolocated, 2P(TP2)4D(TP4)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinpool.config import Role
from twinpool.errors import ConfigError

_DEGREE = r"(?:\(?TP(\d+)\)?)?"
_SPLIT = re.compile(rf"(\d+)P{_DEGREE}(\d+)D{_DEGREE}", re.IGNORECASE)
_COLOCATED = re.compile(rf"(\d+)\s*x?\s*(?:colocated|C)\s*{_DEGREE}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """`num_workers` workers of a role, each on `tp` devices."""

    role: Role
    num_workers: int
    tp: int = 1


def parse_layout(text: str) -> tuple[Part, ...]:
    """The pools of a layout. Raises ConfigError."""
    parts: tuple[Part, ...] = ()
    if (found := _SPLIT.fullmatch(text.strip())) is not None:
        prefill, prefill_tp, decode, decode_tp = (int(part or 1) for part in found.groups())
        parts = (Part(Role.PREFILL, prefill, prefill_tp), Part(Role.DECODE, decode, decode_tp))
    elif (found := _COLOCATED.fullmatch(text.strip())) is not None:
        count, tp = (int(part or 1) for part in found.groups())
        parts = (Part(Role.COLOCATED, count, tp),)
    if not parts or any(part.num_workers < 1 or part.tp < 1 for part in parts):
        raise ConfigError(
            f"--layout is {text!r}; allowed: workers and devices of each, 1 or more, like 1P1D, 2P3D, 2P(TP2)4D(TP4), "
            "4xcolocated, 4xcolocated(TP2)"
        )
    return parts
