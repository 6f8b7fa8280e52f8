"""Whether work that waits makes progress, whatever the HTTP side says."""

from __future__ import annotations

from twinpool.coordinator.registry import Registry
from twinpool.coordinator.worker import Worker
from twinpool.messages import WorkerStats
from twinpool.metrics import WorkerMetric


class Health:
    """Judges by what moves: dispatches, tokens, the workers' step counters, and what workers report of their own
    standstill.

    Health is bad while requests wait for a pool that has no worker, while a worker has stood still for `stall_s`, or
    while nothing has moved anywhere for that long although there is work. It recovers by itself.
    """

    def __init__(self, registry: Registry, stall_s: float) -> None:
        self._registry = registry
        self._stall_s = stall_s
        self._moved_at = 0.0

    def moved(self, now: float) -> None:
        """Something moved, or there was nothing to do."""
        self._moved_at = now

    def heard(self, worker: Worker, stats: WorkerStats, now: float) -> None:
        """A worker's heartbeat came; `worker.stats` are still those of the one before."""
        steps = WorkerMetric.STEPS.value
        before = 0.0 if worker.stats is None else worker.stats.counters.get(steps, 0.0)
        if stats.counters.get(steps, 0.0) > before:
            self.moved(now)

    def verdict(self, num_live: int, num_waiting: int, now: float) -> tuple[bool, str]:
        """Whether all is well, and a sentence that says what stands still. Of `num_live` requests `num_waiting` wait
        for workers.
        """
        if not num_live:
            return True, "there is nothing to do"
        is_ready, missing = self._registry.ready()
        if num_waiting and not is_ready:
            return False, f"{num_waiting} request(s) wait: {missing}"
        for worker in self._registry:
            if worker.stats is not None and worker.stats.stalled_s >= self._stall_s:
                stalled_s = f"{worker.stats.stalled_s:.0f} s"
                return False, f"{worker.role} worker {worker.worker_id} has not got on for {stalled_s}"
        still_s = now - self._moved_at
        if still_s >= self._stall_s:
            return False, f"{num_live} request(s) wait, and nothing has moved for {still_s:.0f} s"
        return True, f"{num_live} request(s) make progress"
