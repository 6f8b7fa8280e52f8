"""The workers of one pool in the order of their load, for choices that look at the first few of many."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from twinpool.errors import InvariantViolation

if TYPE_CHECKING:
    from twinpool.coordinator.worker import Worker

Place = tuple[float, str, "Worker"]
"""Where a worker stands: its load, its name (which no other has)."""


class Loads:
    """Workers by load, equal ones by name.

    `load` tells a worker's. A place is never behind the one that is the worker's by its load now: where a load falls,
    somebody says so (`fell`). One that rises costs nothing until the worker is looked at, which moves it back.
    `num_falls` counts what can make room: loads that fell, and what else `fell` was told for. `num_sequences` are those
    of all workers together, `most_slots` the KV slots of the largest that stays; 0 if none does.
    """

    def __init__(self, load: Callable[[Worker], float]) -> None:
        self.load = load
        self._order: list[Place] = []
        self._places: dict[str, Place] = {}
        self._fallen: dict[str, Worker] = {}
        self.num_falls = 0
        self.num_sequences = 0
        self.most_slots = 0

    def add(self, worker: Worker) -> None:
        """Takes in a worker that has no sequence yet."""
        self._put(worker, self.load(worker))
        self.stays_changed()

    def remove(self, worker: Worker) -> None:
        """Takes out a worker that is gone, with the sequences that it had."""
        self._take(worker)
        self._fallen.pop(worker.worker_id, None)
        self.num_sequences -= worker.num_sequences
        self.stays_changed()

    def stays_changed(self) -> None:
        """Looks again which workers stay: one more does, or one less."""
        staying = (worker.num_slots for *_, worker in self._order if worker.departure is None)
        self.most_slots = max(staying, default=0)
        self.num_falls += 1

    def fell(self, worker: Worker) -> None:
        """The worker may have less to do than before, or more room."""
        self._fallen[worker.worker_id] = worker
        self.num_falls += 1

    def in_order(self) -> Iterator[Place]:
        """All workers, the one with the least load first. No load may change meanwhile."""
        for worker in self._fallen.values():
            self._take(worker)
            self._put(worker, self.load(worker))
        self._fallen.clear()
        load, order, index = self.load, self._order, 0
        while index < len(order):
            place = order[index]
            worker = place[-1]
            if (now := load(worker)) > place[0]:
                del order[index]
                self._put(worker, now)
            else:
                index += 1
                yield place

    def check(self) -> None:
        """Recounts. Raises InvariantViolation: a load fell, and nobody has said so."""
        for before, name, worker in self._order:
            if (now := self.load(worker)) < before and name not in self._fallen:
                raise InvariantViolation(f"the load of {name} fell from {before} to {now} unnoticed")
        if self.num_sequences != (num := sum(worker.num_sequences for *_, worker in self._order)):
            raise InvariantViolation(f"{self.num_sequences} sequences are counted, workers have {num}")

    def _put(self, worker: Worker, load: float) -> None:
        place = self._places[worker.worker_id] = load, worker.worker_id, worker
        insort(self._order, place)

    def _take(self, worker: Worker) -> None:
        place = self._places.pop(worker.worker_id)
        del self._order[bisect_left(self._order, place)]
