"""A worker process takes another role: when it may let go of the one that it has."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.config import Role
from twinpool.messages import WorkerStats

CHANGEABLE = frozenset({Role.PREFILL, Role.DECODE})
"""Roles that a worker can change between."""
EMPTY_WITHIN_S = 3.0
"""A worker that its coordinator believes to hold nothing is given so long until that is so: for the last bytes of other
workers to land, and for their acknowledgements. Beyond it the process starts anew in the new role: its memory, and what
may still be written there, is nobody's then."""


def holds_nothing(stats: WorkerStats) -> bool:
    """Whether every block is free or cached, and nothing waits or runs: nobody reads or writes the pool any more."""
    held = (stats.owned_blocks, stats.quarantined_blocks, stats.leased_blocks, stats.waiting, stats.running)
    return not any(held)


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The process is to have `role`, and leaves its present one as soon as it holds nothing, by `until` at the latest
    (its own clock)."""

    role: Role
    until: float
