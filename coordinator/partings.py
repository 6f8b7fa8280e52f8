"""What becomes of the requests of a worker that is gone, or is to go."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.coordinator.custody import HANDED_ON, Custody
from twinpool.coordinator.lifecycle import Leg, LegKind
from twinpool.coordinator.routing import Router
from twinpool.coordinator.worker import Worker
from twinpool.request import RequestState

LOST = "worker lost"


class Partings:
    """Parts requests from their worker. `remove` takes one that is gone, and why."""

    def __init__(self, custody: Custody, router: Router, remove: Callable[[Worker, str], None]) -> None:
        self._custody = custody
        self._router = router
        self._remove = remove

    def lose(self, worker: Worker, reason: str, now: float) -> None:
        """The worker is gone with all it held. Its requests go on elsewhere, the oldest first."""
        legs = _youngest_first(worker)
        for leg in legs:
            self._custody.close(leg)
        if not worker.keeps_cache:
            self._router.forget(worker)
        self._remove(worker, reason)
        for leg in legs:
            request = leg.request
            if leg.cancelled_at is not None:
                self._custody.settle(request, now)
            elif leg.kind is LegKind.PREFILL and request.state is RequestState.TRANSFERRING:
                # Decode may have all of it already: it says HandoffReport or, once it hears of the loss,
                # Dropped.
                continue
            else:
                self._custody.resume(request, LOST, now, detail=f"worker {worker.worker_id} {reason}")

    def hand_on(self, worker: Worker, most_slots: int, why: str, now: float) -> None:
        """The worker lives and is to hold nothing any more: what it has not been told to cancel goes on elsewhere. One
        that may need more than `most_slots`, which there are there, ends where it is."""
        for leg in _youngest_first(worker):
            if leg.cancelled_at is None and leg.request.max_slots <= most_slots:
                self._custody.resume(leg.request, HANDED_ON, now, detail=f"{worker.worker_id} {why}")


def _youngest_first(worker: Worker) -> list[Leg]:
    """Each goes to the head of the queue, so the oldest is first there in the end."""
    return sorted(worker.legs.values(), key=lambda leg: leg.request.timeline.received_at, reverse=True)
