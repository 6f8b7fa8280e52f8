"""Layouts as people write them: 2P3D, 4xcolocated, 2P(TP2)4D(TP4)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinpool.config import Role
from twinpool.errors import ConfigError

_DEGREE = r"(?:\(?TP([0-9]+)\)?)?"
_SPLIT = re.compile(rf"([0-9]+)P{_DEGREE}([0-9]+)D{_DEGREE}", re.IGNORECASE)
_COLOCATED = re.compile(rf"([0-9]+)\s*x?\s*(?:colocated|C)\s*{_DEGREE}", re.IGNORECASE)
MOST_SIMULATED_WORKERS = 10_000
"""Of each role: one takes about 1 MB of memory. A server has fewer (`config.MOST_WORKERS`)."""


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
    if not parts or any(not 1 <= part.num_workers <= MOST_SIMULATED_WORKERS or part.tp < 1 for part in parts):
        raise ConfigError(
            f"--layout is {text!r}; allowed: 1 to {MOST_SIMULATED_WORKERS:,} workers of a role, on 1 or more devices "
            "each, like 1P1D, 2P3D, 2P(TP2)4D(TP4), 4xcolocated, 4xcolocated(TP2)"
        )
    return parts
