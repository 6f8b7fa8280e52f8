"""What a simulation says beside what a bench says of a run."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.planner.deployment import Deployment
from twinpool.planner.simulator.outcomes import Simulation


def about(simulation: Simulation, deployment: Deployment) -> Iterator[str]:
    """What was simulated, what its workers did, and what went wrong; a line each."""
    for pool in deployment.pools:
        workers = [worker for worker in simulation.workers if worker.role is pool.role]
        kv_share = sum(worker.kv_share for worker in workers) / len(workers)
        most = max(worker.most_kv_share for worker in workers)
        yield (
            f"{pool.num_workers} {pool.role} of {pool.times.name}: computing {simulation.busy_share(pool.role):.0%} of "
            f"the time, {kv_share:.0%} of {pool.num_blocks:,} KV blocks held on average, {most:.0%} at most"
        )
    for reason, count in sorted(simulation.attempts_lost.items()):
        yield f"{count} attempts were started again: {reason}"
    for warning in simulation.warnings:
        yield f"WARNING: {warning}"
    yield f"simulated: {deployment.name}; no server was loaded, and nothing was measured"
