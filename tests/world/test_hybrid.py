"""Hybrids at realistic rates, in virtual time: a burst is served sooner, and streams keep their budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.coordinator.timeline import Way
from twinpool.metrics import CoordinatorMetric, Timing, WorkerMetric
from twinpool.request import SamplingParams
from twinpool.step_pace import StepPace
from world.client import Ask
from world.model import VOCABULARY
from world.scenario import Scenario
from world.world import World

PACE = StepPace(base_s=0.007, sequence_s=0.0003, prompt_token_s=0.00025)
"""4,000 prompt tokens per second, and decode steps of 7 ms and more: a small model on a fast core."""


def asks(count: int, num_prompt: int, num_output: int, at_s: float, name: str = "r") -> tuple[Ask, ...]:
    """So many requests at once, no two with a common prefix."""
    sampling = SamplingParams(max_tokens=num_output, seed=1, temperature=0.0, ignore_eos=True)
    return tuple(
        Ask(
            f"{name}{i}", at_s, tuple(1 + (i * 7 + j) % (VOCABULARY - 1) for j in range(num_prompt)), sampling
        )
        for i in range(count)
    )


def scenario(is_hybrid: bool, requests: tuple[Ask, ...]) -> Scenario:
    """One prefill and one decode worker with room for everything."""
    return Scenario(
        seed=5,
        pools={Role.PREFILL: 1, Role.DECODE: 1},
        num_blocks=2048,
        block_size=16,
        workers=SchedulerConfig(max_num_seqs=64, hybrid=is_hybrid, prefix_cache=False),
        coordinator=CoordinatorConfig(heartbeat_s=0.2, lease_s=1.0),
        asks=requests,
        jitter_s=0.0005,
        pace=PACE,
    )


def run(world: World) -> float:
    """Runs to the end; returns when the last answer was complete."""
    world.run()
    assert all(client.is_answered for client in world.clients)
    return max(client.ended_at for client in world.clients)


def test_a_burst_is_served_sooner_when_both_workers_do_both() -> None:
    burst = asks(32, 256, 64, at_s=1.0)
    split_s, hybrid_s = (run(World(scenario(is_hybrid, burst))) - 1.0 for is_hybrid in (False, True))
    assert hybrid_s < 0.85 * split_s


def test_both_kinds_of_choices_are_made_recorded_counted_and_nearly_right() -> None:
    world = World(scenario(True, asks(32, 256, 64, at_s=1.0)))
    run(world)
    core = world.coordinator.core
    choices = core.tally.counts(CoordinatorMetric.HYBRID_CHOICES)
    assert set(choices) == set(Way)
    assert sum(choices.values()) == 32
    local, errors_s = 0, list[float]()
    for i in range(32):
        timeline = core.timeline(f"r{i}")
        assert timeline is not None
        told = timeline.to_json(0.0)["attempts"][0]["hybrid"]
        won = told["predicted"][0]
        assert told["way"] == won["way"]
        assert {p["way"] for p in told["predicted"]} >= {Way.SPLIT, told["way"]}
        errors_s.append(abs(told["first_token_s"] - won["first_token_s"]))
        local += told["way"] == Way.LOCAL_PREFILL
    assert fmean(errors_s) < 0.2
    assert sum(core.tally.timings[Timing.PREDICTION_ERROR].counts) == 32
    decode, prefill = (world.of_role(role)[0].core.counters for role in (Role.DECODE, Role.PREFILL))
    assert decode[WorkerMetric.HYBRID_PROMPT_TOKENS] == 256 * local
    assert decode[WorkerMetric.DECODE_POOL_PROMPT_TOKENS] == 0
    assert prefill[WorkerMetric.HYBRID_OUTPUT_TOKENS] == 63 * choices[Way.LOCAL_DECODE]


def test_prompts_that_come_all_the_time_stretch_no_gap_of_a_stream_beyond_the_budget() -> None:
    """What the world checks at every step of a hybrid, checked here as a client sees it."""
    streams = asks(4, 16, 400, at_s=1.0, name="s")
    prompts = tuple(ask for i in range(20) for ask in asks(3, 300, 2, at_s=1.5 + 0.2 * i, name=f"p{i}-"))
    plan = scenario(True, (*streams, *prompts))
    world = World(replace(plan, workers=replace(plan.workers, itl_budget_ms=60.0)))
    arrivals: dict[str, list[float]] = {ask.request_id: [] for ask in streams}
    for client in world.clients:
        if client.name in arrivals:
            emitted, at = client.emitted, arrivals[client.name]
            client.emitted = lambda output, emitted=emitted, at=at: (  # type: ignore[method-assign]
                at.append(world.schedule.now), emitted(output),
            )[1]  # fmt: skip
    run(world)
    for at in arrivals.values():
        assert max(later - earlier for earlier, later in pairwise(at)) < 0.060
    assert world.of_role(Role.DECODE)[0].core.counters[WorkerMetric.HYBRID_PROMPT_TOKENS] > 0


def test_a_decode_worker_that_holds_the_prefix_computes_the_rest_itself() -> None:
    first, second = asks(1, 800, 40, at_s=1.0)[0], asks(1, 840, 8, at_s=3.0)[0]
    busy = asks(2, 1500, 2, at_s=2.99, name="busy")[1]
    plan = scenario(True, (first, busy, replace(second, request_id="again")))
    world = World(replace(plan, workers=replace(plan.workers, prefix_cache=True)))
    run(world)
    timeline = world.coordinator.core.timeline("again")
    assert timeline is not None
    assert timeline.attempts[0].way is Way.LOCAL_PREFILL
    assert timeline.attempts[0].prefill is not None
    assert timeline.attempts[0].prefill.num_cached >= 784
