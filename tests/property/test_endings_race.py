"""A request is ended from outside in the very step in which it completes, and its client tries again at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.coordinator_core import CoreDriver, submission
from support.coordinator_pools import Pools, expected_tokens, is_answered

from twinpool.config import Role
from twinpool.coordinator.events import Arrived
from twinpool.errors import ClientTooSlow
from twinpool.metrics import CoordinatorMetric
from twinpool.request import RequestState

POOLS = {
    "split": {"P": Role.PREFILL, "D": Role.DECODE},
    "colocated": {"K": Role.COLOCATED},
}
ENDINGS: dict[str, Callable[[CoreDriver, str], None]] = {
    "abandoned": lambda driver, request_id: driver.abandon(request_id),
    "cancelled": lambda driver, request_id: driver.cancel(request_id),
    "cut": lambda driver, request_id: driver.cut(ClientTooSlow("too slow"), request_id),
    "completed": lambda driver, request_id: driver.complete(len(driver.tokens(request_id)), request_id),
    "out of time": lambda driver, _: driver.advance(0.05),
}
NUM_RUNS = 100
"""Of each ending with each kind of pools: 1,000 in all."""


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("pools", POOLS)
def test_ends_within_a_step_of_completion_leave_nothing_behind_and_retries_are_served(
    pools: str, ending: str
) -> None:
    for seed in range(NUM_RUNS):
        rng = random.Random(seed)
        driver = CoreDriver()
        workers = Pools(driver, POOLS[pools])
        for attempt in range(3):
            end_near_completion(rng, driver, workers, f"try-{attempt}", ending)
        served = submission("served", num_prompt=7, max_tokens=3, at=driver.now - 0.003)
        driver.do(Arrived(served))
        workers.collect()
        workers.run_until_quiet()
        assert driver.tokens("served") == expected_tokens(served.prompt_token_ids, 3)
        assert not any(process.tasks for process in workers.processes.values())
        assert driver.count(CoordinatorMetric.DUPLICATE_TOKENS) == 0
        assert driver.count(CoordinatorMetric.PROTOCOL_FAULTS) == 0
        assert driver.core.tally.counts(CoordinatorMetric.REQUESTS).get(RequestState.FAILED, 0) == (
            sum(driver.state(f"try-{i}") is RequestState.FAILED for i in range(3))
        )
        driver.assert_empty()


def end_near_completion(
    rng: random.Random, driver: CoreDriver, workers: Pools, request_id: str, ending: str
) -> None:
    """Runs one request until it is within a step of its last token, on either side, and ends it from outside."""
    max_tokens = rng.randint(1, 3)
    deadline = driver.now + 0.04 if ending == "out of time" else None
    num_prompt, first, at = rng.randint(1, 5), rng.randint(0, 9), driver.now - 0.003
    request = submission(request_id, num_prompt, max_tokens, at, first, deadline=deadline)
    wanted = expected_tokens(request.prompt_token_ids, max_tokens)
    driver.do(Arrived(request))
    workers.collect()
    assert request_id not in driver.refusals
    while len(driver.tokens(request_id)) < len(wanted) - 1:
        workers.act(*rng.choice(workers.choices()))
    for _ in range(rng.randint(0, 6)):
        if choices := workers.choices():
            workers.act(*rng.choice(choices))
    ENDINGS[ending](driver, request_id)
    workers.collect()
    if not is_answered(driver.finish(request_id)):
        assert driver.tokens(request_id) == wanted[: len(driver.tokens(request_id))]
        assert ending == "completed" or driver.outputs[request_id][-1].error is not None
    for _ in range(rng.randint(0, 3)):  # the client is back while the workers still let go
        if choices := workers.choices():
            workers.act(*rng.choice(choices))
