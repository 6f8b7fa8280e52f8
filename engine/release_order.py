"""What was released, in that order, from which any can be taken; many at once cost little more than one. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Thing = TypeVar("Thing", bound=Hashable)


class ReleaseOrder(Generic[Thing]):
    """Things in the order in which they were added, at 8 bytes each.

    As a dict's keys, but many are added or taken at once, and taking the first is as quick after many were taken. One
    that is removed from the middle keeps its place, and is passed over when that comes to the front; when more places
    are such than not, they are given up.
    """

    __slots__ = ("_first", "_num_removed", "_places", "_removed")

    def __init__(self, things: Iterable[Thing] = ()) -> None:
        self._places = list(things)
        self._first = 0
        """The place before which all were taken."""
        self._removed: dict[Thing, int] = {}
        """How many of its places from there on, the first ones, a thing has left."""
        self._num_removed = 0

    def __len__(self) -> int:
        return len(self._places) - self._first - self._num_removed

    def __iter__(self) -> Iterator[Thing]:
        return _present(self._places[self._first :], self._removed.copy())

    def extend(self, things: Iterable[Thing]) -> None:
        """Puts them last, in order. None of them may be here."""
        self._places += things

    def remove(self, thing: Thing) -> None:
        """Takes it out. It must be here."""
        self._removed[thing] = self._removed.get(thing, 0) + 1
        self._num_removed += 1
        if self._num_removed > len(self):
            self._places, self._first = list(self), 0
            self._removed.clear()
            self._num_removed = 0

    def take_first(self, num: int) -> list[Thing]:
        """Takes out the `num` that were added first, in order. There must be so many."""
        taken: list[Thing] = []
        while len(taken) < num:
            first, self._first = self._first, self._first + num - len(taken)
            passed = self._places[first : self._first]
            if self._num_removed:
                found = list(_present(passed, self._removed))
                self._num_removed -= len(passed) - len(found)
                taken += found
            else:
                taken += passed
        if self._first > len(self._places) // 2:
            del self._places[: self._first]
            self._first = 0
        return taken


def _present(things: Sequence[Thing], removed: dict[Thing, int]) -> Iterator[Thing]:
    """Those that have not left their place; the others are taken out of `removed`."""
    for thing in things:
        if thing not in removed:
            yield thing
        elif removed[thing] == 1:
            del removed[thing]
        else:
            removed[thing] -= 1
