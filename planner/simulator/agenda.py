"""Virtual time: what is to happen when, in an order that depends on nothing but its content."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

STEP_MESSAGES = 1 << 20
"""The rank of what worker 0 tells the coordinator at a step's end; a worker's number is added."""
LATER = 1 << 30
"""The rank of everything else."""
_BEFORE = 1 << 62
"""More than there will ever be entries."""


class Agenda:
    """Actions in order of their time.

    Of one time the lower `rank` comes first, then what was put down first. Ends of steps have the number of their
    worker as rank, so that at one moment all steps end before anybody hears of it, in whichever order they began. What
    is put down `LATER` for this very moment comes after all else that is there for it, so it stands in a line of its
    own.
    """

    __slots__ = ("_at_once", "_entries", "_num_entries", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._at_once = deque[tuple[Callable[[Any], None], Any]]()
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._at_once)

    def at(self, when: float, rank: int, action: Callable[[Any], None], argument: object) -> None:
        """`action(argument)` happens at `when`, which is not before now."""
        if when == self.now and rank == LATER:
            self._at_once.append((action, argument))
            return
        self._num_entries += 1
        heappush(self._entries, (when, rank, self._num_entries, action, argument))

    def at_first(self, when: float, rank: int, action: Callable[[Any], None], argument: object) -> None:
        """As `at`, before all that was put down with `at` for that time and rank."""
        self._num_entries += 1
        heappush(self._entries, (when, rank, self._num_entries - _BEFORE, action, argument))

    def step(self) -> None:
        """Does what is next. The agenda must not be empty."""
        entries = self._entries
        if self._at_once and not (entries and entries[0][0] == self.now):
            action, argument = self._at_once.popleft()
        else:
            self.now, _, _, action, argument = heappop(entries)
        action(argument)
