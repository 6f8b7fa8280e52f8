"""The worked example of admission: who cannot be served in time is told so at once, and nobody else is turned away."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.errors import QueueFull
from twinpool.request import RequestState, SamplingParams
from world.client import Ask
from world.scenario import Scenario
from world.world import World

NUM_REQUESTS = 2_400
OFFERED_PER_S = 4.0
SERVED_PER_S = 2.88
MAX_WAIT_S = 2.0


def overload(seed: int, spread: float) -> Scenario:
    """A server of 2.88 requests/s, whose service times are spread evenly around their mean, under 4 requests/s."""
    dice = Random(seed)
    duration_s = NUM_REQUESTS / OFFERED_PER_S
    times = sorted(1.0 + dice.random() * duration_s for _ in range(NUM_REQUESTS))
    sampling = SamplingParams(max_tokens=1, seed=0)
    return Scenario(
        seed,
        {Role.COLOCATED: 1},
        num_blocks=8,
        workers=SchedulerConfig(token_budget=8, max_num_seqs=1),
        coordinator=CoordinatorConfig(
            max_wait_s=MAX_WAIT_S,
            max_in_flight=1,
            heartbeat_s=0.5,
            lease_s=5.0,
            finished_timelines=NUM_REQUESTS,
        ),
        asks=tuple(Ask(f"r{i}", at_s, (1 + i % 40, 2, 3), sampling) for i, at_s in enumerate(times)),
        step_s=((1 - spread) / SERVED_PER_S, (1 + spread) / SERVED_PER_S),
        hears_after_s=(0.0,),
        jitter_s=0.0002,
    )


@pytest.mark.parametrize(("spread", "most_in_vain"), [(0.0, 0), (0.5, 5)])
def test_a_service_limit_of_2_88_requests_per_s_under_4_with_2_s_to_wait_rejects_28_percent(
    spread: float, most_in_vain: int
) -> None:
    """Where services differ by half, a wait that was predicted with a margin may still come out too long: rarely."""
    world = World(overload(7, spread))
    world.run()
    rejected = [client for client in world.clients if client.is_refused]
    assert 0.26 <= len(rejected) / NUM_REQUESTS <= 0.30
    for client in rejected:
        assert isinstance(client.error, QueueFull)
        assert client.ended_at == client.ask.at_s  # at once: no time passes before the refusal
        assert 0 < client.error.retry_after_s <= MAX_WAIT_S
    others = Counter(client.state for client in world.clients if not client.is_refused)
    assert others.keys() <= {RequestState.COMPLETED, RequestState.TIMED_OUT}
    assert others[RequestState.TIMED_OUT] <= most_in_vain


def test_a_server_that_keeps_up_rejects_nobody() -> None:
    scenario = overload(7, 0.5)
    world = World(
        replace(scenario, asks=scenario.asks[:600], step_s=(0.25 / OFFERED_PER_S, 0.75 / OFFERED_PER_S))
    )
    world.run()
    assert {client.state for client in world.clients} == {RequestState.COMPLETED}
