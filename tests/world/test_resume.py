"""Whatever takes a request away from its worker, at any moment: it goes on with the tokens of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.config import CoordinatorConfig, Role
from twinpool.request import SamplingParams
from world.client import Ask
from world.model import text
from world.scenario import Fault, FaultKind, Scenario
from world.world import World

PROMPT = (5, 17, 42, 8, 23, 11, 39, 2, 60, 31, 7)
NUM_MOMENTS = 12


def ask(**sampling: object) -> Ask:
    """The request that is disturbed."""
    return Ask(
        "r1", 0.2, PROMPT, SamplingParams(**{"max_tokens": 16, "seed": 11, "ignore_eos": True, **sampling})
    )


def stopping(request: Ask, num_tokens: int) -> Ask:
    """The same request with a stop string of two tokens, which its answer has behind `num_tokens` tokens."""
    whole, _ = request.wanted()
    return replace(request, stop=text(whole[num_tokens]) + text(whole[num_tokens + 1]))


ASKS: dict[str, Ask] = {
    "greedy": ask(temperature=0.0),
    "seeded": ask(),
    "stop string": stopping(ask(), 9),
    "stop string, greedy": stopping(ask(temperature=0.0), 9),
    "end of text": ask(ignore_eos=False, seed=13, max_tokens=20),
    "stop token": ask(stop_token_ids=(1, 2, 3, 4, 5, 6), min_tokens=5),
    "log probabilities": ask(logprobs=2, prompt_logprobs=1, repetition_penalty=1.2),
}
"""Every way of sampling and stopping; what comes to the sampler later joins here."""


SPLIT = {Role.PREFILL: 1, Role.DECODE: 1}
COLOCATED = {Role.COLOCATED: 1}
DISTURBANCES: dict[str, tuple[dict[Role, int], FaultKind, int]] = {
    "prefill killed": (SPLIT, FaultKind.KILL, 0),
    "decode killed": (SPLIT, FaultKind.KILL, 1),
    "colocated killed": (COLOCATED, FaultKind.KILL, 0),
    "prefill frozen": (SPLIT, FaultKind.FREEZE, 0),
    "decode frozen": (SPLIT, FaultKind.FREEZE, 1),
    "colocated frozen": (COLOCATED, FaultKind.FREEZE, 0),
    "prefill drained": (SPLIT, FaultKind.LEAVE, 0),
    "decode drained": (SPLIT, FaultKind.LEAVE, 1),
    "colocated drained": (COLOCATED, FaultKind.LEAVE, 0),
    "KV corrupt": (SPLIT, FaultKind.CORRUPT, 0),
    "link broken": (SPLIT, FaultKind.BREAK_LINK, 0),
}
"""The pools, and what happens to which of their workers (or wires)."""
FROZEN_S = 1.5
"""Longer than a lease: who stands still for so long counts as lost."""


def scenario(request: Ask, pools: dict[Role, int], is_one_sided: bool) -> Scenario:
    """Two requests, so that batches have company; the one that is disturbed came second."""
    other = Ask("r0", 0.15, PROMPT[:5], SamplingParams(max_tokens=12, seed=3))
    config = CoordinatorConfig(heartbeat_s=0.2, lease_s=1.0, max_attempts=5)
    return Scenario(3, pools, is_one_sided=is_one_sided, coordinator=config, asks=(other, request))


def undisturbed(plan: Scenario) -> list[float]:
    """Moments spread over the life of the request in a run without disturbance."""
    world = World(plan)
    client, moments = world.clients[1], list[float]()
    while not client.is_over:
        world.step()
        if world.schedule.now >= client.ask.at_s:
            moments.append(world.schedule.now)
    return moments[:: max(1, len(moments) // NUM_MOMENTS)]


@pytest.mark.parametrize("request_kind", ASKS)
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_the_stream_goes_on_with_the_same_tokens(disturbance: str, request_kind: str) -> None:
    pools, kind, which = DISTURBANCES[disturbance]
    num_resumed = 0
    for is_one_sided in (True, False):
        plan = scenario(ASKS[request_kind], pools, is_one_sided)
        for moment in undisturbed(plan):
            world = World(plan)
            world.run_until_s(moment)
            world.strike(Fault(moment, kind, which, FROZEN_S))
            world.run()
            client = world.clients[1]
            assert client.is_answered, f"disturbed at {moment}: {client.tokens}, {client.error}"
            timeline = world.coordinator.core.timeline(client.name)
            assert timeline is not None
            num_resumed += len(timeline.attempts) > 1
    assert num_resumed > 0


@pytest.mark.parametrize("pools", [SPLIT, COLOCATED], ids=["split", "colocated"])
@pytest.mark.parametrize("request_kind", ASKS)
def test_the_stream_goes_on_after_preemption(request_kind: str, pools: dict[Role, int]) -> None:
    num_preempted = 0
    older = Ask("r0", 0.15, PROMPT, SamplingParams(max_tokens=20, seed=3, ignore_eos=True))
    for late_ms in range(0, 40, 4):
        request = replace(ASKS[request_kind], at_s=0.16 + late_ms / 1000)
        plan = replace(scenario(request, pools, is_one_sided=True), num_blocks=9, asks=(older, request))
        world = World(plan)
        world.run()
        assert all(client.is_answered for client in world.clients)
        timeline = world.coordinator.core.timeline(request.request_id)
        assert timeline is not None
        num_preempted += len(timeline.attempts) > 1
    assert num_preempted > 0
