"""What an operator sees of the pools: JSON values."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from twinpool.config import Role
from twinpool.coordinator.registry import OTHER_ROLE, Registry
from twinpool.coordinator.scaler import Scaler
from twinpool.coordinator.worker import Departure, Worker


class WorkerState(StrEnum):
    """What a worker is shown as."""

    SERVES = "serves"
    DRAINS = "drains"
    CHANGES = "changes role"
    STARTS = "starts"
    FAILED = "failed"


def pool_status(registry: Registry, scaler: Scaler | None, now: float) -> dict[str, Any]:
    """Every worker that has joined, also while it changes its role; those of `scaler` that have not, and what for; and
    those that have failed to start, with why."""
    here = {worker.worker_id: worker for worker in registry} | registry.changing
    workers = [_worker(registry, worker, now) for worker in here.values()]
    if scaler is not None:
        workers += [
            {
                "worker": worker_id,
                "role": role.value,
                "state": WorkerState.STARTS.value,
                "waits_for": scaler.waits_for(),
            }
            for worker_id, role in scaler.workers().items()
            if worker_id not in here
        ]
        workers += [
            {"worker": worker_id, "state": WorkerState.FAILED.value, "reason": reason}
            for worker_id, reason in scaler.failed().items()
            if worker_id not in here
        ]
    is_ready, reason = registry.ready()
    serving = [worker for worker in registry if worker.stays]
    return {
        "ready": is_ready,
        "reason": reason,
        "pools": {role.value: sum(worker.role is role for worker in serving) for role in Role},
        "workers": sorted(workers, key=lambda worker: (worker.get("role", ""), worker["worker"])),
    }


def _worker(registry: Registry, worker: Worker, now: float) -> dict[str, Any]:
    stats, departure = worker.stats, worker.departure
    told: dict[str, Any] = {
        "worker": worker.worker_id,
        "role": worker.role.value,
        "state": _state(departure).value,
        "since_s": round(now - worker.joined_at, 3),
        "heard_s": round(now - worker.seen_at, 3),
        "pid": worker.info.pid,
        "attempts": len(worker.legs),
        "prompt_tokens_pending": worker.pending_tokens,
        "sequences": worker.num_sequences,
        "max_num_seqs": worker.info.max_num_seqs,
        "kv_blocks": {"total": worker.info.num_blocks},
        "links": _links(registry, worker),
    }
    if stats is not None:
        told["kv_blocks"] |= {
            "free": stats.free_blocks,
            "owned": stats.owned_blocks,
            "cached": stats.cached_blocks,
            "quarantined": stats.quarantined_blocks,
        }
    if departure is not None:
        told["hands_on_in_s"] = round(max(0.0, departure.hand_on_at - now), 3)
        if departure.role is not None:
            told["becomes"] = departure.role.value
    if worker.info.fixed_role:
        told["fixed_role"] = worker.info.fixed_role
    return told


def _state(departure: Departure | None) -> WorkerState:
    if departure is None:
        return WorkerState.SERVES
    return WorkerState.DRAINS if departure.role is None else WorkerState.CHANGES


def _links(registry: Registry, worker: Worker) -> list[dict[str, Any]]:
    if worker.role not in OTHER_ROLE:
        return []
    found = []
    for other in registry.of_role(OTHER_ROLE[worker.role]):
        pair = (worker, other) if worker.role is Role.PREFILL else (other, worker)
        if (link := registry.link(*pair)) is not None:
            found.append({"worker": other.worker_id, "transport": link.transport, "gb_per_s": link.gb_per_s})
    return found
