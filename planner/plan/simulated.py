"""The simulator as the planner uses it: a run of the serving cores, reduced to what objectives are about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.distributions import Values, percentile
from twinpool.bench.serving.record import Ending
from twinpool.planner.deployment import Deployment
from twinpool.planner.plan.experiments import Seen, Use, measured
from twinpool.planner.simulator.driver import simulate
from twinpool.planner.simulator.outcomes import Outcome, Simulation


def simulated(deployment: Deployment, shapes: Sequence[Shape]) -> Seen:
    """Runs it. Raises KeyboardInterrupt if Ctrl-C came meanwhile."""
    found = simulate(deployment, shapes)
    if found.was_interrupted:
        raise KeyboardInterrupt
    return seen_of(found)


def seen_of(simulation: Simulation) -> Seen:
    """What the clients of the measured requests saw, by the bench's definitions (`bench/serving/metrics.py`)."""
    outcomes = simulation.outcomes[measured(len(simulation.outcomes))]
    found = np.array([_times(outcome) for outcome in outcomes], dtype=np.float64).reshape(-1, 4).T
    uses = {
        role: Use(
            float(np.mean([worker.busy_s for worker in workers])) / (simulation.duration_s or math.inf),
            float(np.mean([worker.kv_share for worker in workers])),
            max(worker.most_kv_share for worker in workers),
        )
        for role in dict.fromkeys(worker.role for worker in simulation.workers)
        if (workers := [worker for worker in simulation.workers if worker.role is role])
    }
    ttft, tpot, itl, e2e = found
    return Seen(ttft, tpot, itl, e2e, uses)


def _times(outcome: Outcome) -> tuple[float, float, float, float]:
    """TTFT, TPOT, p99 of the gaps, E2E."""
    times: Values = np.asarray(outcome.times, dtype=np.float64)
    if outcome.ending is not Ending.COMPLETED or not len(times):
        return math.inf, math.inf, math.inf, math.inf
    first, last = float(times[0]), float(times[-1])
    start = outcome.intended_at_s
    if len(times) < 2:
        return first - start, 0.0, 0.0, last - start
    return first - start, (last - first) / (len(times) - 1), percentile(np.diff(times), 99), last - start
