"""An answer that its grammar lets go no further ends with the reason, wherever it is computed, and frees everything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.config import Role, SchedulerConfig
from twinpool.request import RequestState, SamplingParams
from twinpool.step_pace import StepPace
from world.client import Ask
from world.model import ending_at
from world.scenario import Scenario
from world.world import World

SPLIT = {Role.PREFILL: 1, Role.DECODE: 1}
POOLS = {"split": (SPLIT, False), "hybrid": (SPLIT, True), "colocated": ({Role.COLOCATED: 1}, False)}


def scenario(num_tokens: int, pools: dict[Role, int], is_hybrid: bool) -> Scenario:
    """Four requests, of which every other one gets no more than `num_tokens`."""
    whole = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)
    ended = replace(whole, grammar=ending_at(num_tokens))
    asks = [Ask(f"r{i}", 0.2, (7 * i, 3, 5, 8, 2), ended if i % 2 else whole) for i in range(4)]
    workers = SchedulerConfig(token_budget=64, headroom_tokens=4, hybrid=is_hybrid)
    pace = StepPace(0.004, 0.0005, 0.001) if is_hybrid else None
    return Scenario(11, pools, workers=workers, asks=tuple(asks), pace=pace)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_the_client_gets_what_fits_and_then_the_reason(pool: str, num_tokens: int) -> None:
    world = World(scenario(num_tokens, *POOLS[pool]))
    world.run()
    for client in world.clients[::2]:
        assert client.is_answered
    for client in world.clients[1::2]:
        assert client.state is RequestState.FAILED
        assert client.tokens == client.whole[:num_tokens]
        assert client.error is not None
        assert f"no token fits at {num_tokens}" in client.error.message
