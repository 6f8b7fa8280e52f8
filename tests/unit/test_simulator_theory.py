"""Simulations in the limits where theory is exact: queues, utilization, Little's law, worked capacity numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from random import Random
from statistics import fmean

import pytest
from support.simulated import LinearTimes, colocated, poisson_times, requests_at, split, unbounded

from twinpool.bench.serving.datasets.shapes import Shape, own, shared_prefix
from twinpool.bench.serving.record import Ending
from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.planner.simulator.driver import simulate
from twinpool.planner.simulator.outcomes import Simulation

ONE_PROMPT_A_STEP = SchedulerConfig(token_budget=16)


def even_poisson_times(num_requests: int, rate_per_s: float, seed: int) -> list[float]:
    """Times whose gaps are the quantiles of the exponential distribution, shuffled: with less noise than a Poisson
    process has, so that few requests tell what many would."""
    gaps = [-math.log(1 - (i + 0.5) / num_requests) / rate_per_s for i in range(num_requests)]
    Random(seed).shuffle(gaps)
    return list(accumulate(gaps))


def typical_times(num_requests: int, rate_per_s: float, service_s: float) -> list[float]:
    """Such times that a queue with constant services, by Lindley's recursion, waits as long as theory says that it does
    on average: a sample that is typical, not one that is long."""
    for seed in count():
        times_s = even_poisson_times(num_requests, rate_per_s, seed)
        waits_s = [end_s - at_s for end_s, at_s in zip(ends_s(times_s, service_s), times_s, strict=True)]
        if fmean(waits_s) == pytest.approx(m_d_1_s(rate_per_s, service_s), rel=0.002):
            return times_s
    raise AssertionError


def ends_s(times_s: Sequence[float], service_s: float) -> Iterator[float]:
    """When services end that begin when the one before has ended: Lindley's recursion."""
    free_at_s = 0.0
    for at_s in times_s:
        free_at_s = max(free_at_s, at_s) + service_s
        yield free_at_s


def m_d_1_s(rate_per_s: float, service_s: float) -> float:
    """DistServe, OSDI 2024: TTFT = D + R · D² / (2 · (1 − R · D)) for constant service times D at rate R."""
    return service_s + rate_per_s * service_s**2 / (2 * (1 - rate_per_s * service_s))


def prefill_only(service_s: float, times_s: list[float]) -> Simulation:
    """One prefill worker whose steps take `service_s` and have one prompt each; answers of one token."""
    deployment = split(
        1, 1, LinearTimes(base_s=service_s), LinearTimes(base_s=0.01), prefill_config=ONE_PROMPT_A_STEP
    )
    return simulate(deployment, requests_at(times_s, 16, 1))


def mean_ttft_s(simulation: Simulation) -> float:
    return fmean(outcome.times[0] - outcome.sent_at_s for outcome in simulation.outcomes)


@pytest.mark.parametrize("rate_per_s", [3.0, 5.0, 7.0])
def test_one_prefill_worker_is_an_m_d_1_queue(rate_per_s: float) -> None:
    found = prefill_only(0.1, typical_times(700, rate_per_s, 0.1))
    assert mean_ttft_s(found) == pytest.approx(m_d_1_s(rate_per_s, 0.1), rel=0.01)


def test_k_way_tensor_parallelism_is_the_same_queue_with_a_kth_of_the_service() -> None:
    """The same source: TTFT = D / K + R · D² / (2 · K · (K − R · D))."""
    whole_s, degree, rate_per_s = 0.4, 4, 6.0
    found = prefill_only(whole_s / degree, typical_times(700, rate_per_s, whole_s / degree))
    theory_s = whole_s / degree + rate_per_s * whole_s**2 / (2 * degree * (degree - rate_per_s * whole_s))
    assert mean_ttft_s(found) == pytest.approx(theory_s, rel=0.01)


def test_every_wait_is_that_of_lindleys_recursion() -> None:
    """Whatever the arrivals: who comes waits for what is left of the work before it, and for nothing else."""
    times_s = list(poisson_times(500, 9.0, 3))
    seen_s = [outcome.times[0] for outcome in prefill_only(0.1, times_s).outcomes]
    assert seen_s == pytest.approx(list(ends_s(times_s, 0.1)), abs=1e-6)


def test_littles_law_and_the_utilization_law_hold() -> None:
    """L = λ · W for requests in the system, counted while the run went on; busy share = λ · D of the worker."""
    service_s, rate_per_s = 0.1, 6.0
    found = prefill_only(service_s, even_poisson_times(1000, rate_per_s, 4))
    throughput = len(found.outcomes) / found.duration_s
    stays_s = [outcome.ended_at_s - outcome.sent_at_s for outcome in found.outcomes]
    assert found.mean_in_flight == pytest.approx(throughput * fmean(stays_s), rel=0.01)
    assert found.busy_share(Role.PREFILL) == pytest.approx(throughput * service_s, rel=0.01)


# ── the worked capacity numbers ─────────────────────────────────────────────────────────────────────────────

PROMPT, ANSWER, SEQUENCES = 2000, 300, 32
ACCELERATOR = LinearTimes(base_s=SEQUENCES / 1600, prompt_token_s=0.16 / PROMPT)
"""2,000 prompt tokens in 0.16 s; 1,600 tokens/s from 32 sequences, a step of 20 ms."""


def saturated(shapes: list[Shape]) -> Simulation:
    """One accelerator that does both, with more clients than it takes at once."""
    config = SchedulerConfig(token_budget=PROMPT + SEQUENCES, max_num_seqs=SEQUENCES)
    deployment = colocated(1, ACCELERATOR, config=config, num_blocks=8192)
    return simulate(deployment, shapes, num_clients=SEQUENCES + 4)


def middle_rate(simulation: Simulation) -> float:
    """Answers per second while all places are taken: over whole rounds, in each of which every place is taken once."""
    ends = sorted(outcome.ended_at_s for outcome in simulation.outcomes)
    first, last = SEQUENCES, 4 * SEQUENCES
    return (last - first) / (ends[last] - ends[first])


def test_016_s_of_prefill_and_300_of_1600_tokens_per_s_are_2_88_requests_per_s_with_32_in_flight() -> None:
    found = saturated([Shape((own(i, PROMPT),), ANSWER) for i in range(5 * SEQUENCES)])
    assert middle_rate(found) == pytest.approx(1 / (0.16 + 300 / 1600), rel=0.01)
    assert middle_rate(found) == pytest.approx(2.88, rel=0.01)
    stays_s = [0.16 + o.times[-1] - o.times[0] for o in found.outcomes[SEQUENCES : 4 * SEQUENCES]]
    assert middle_rate(found) * fmean(stays_s) == pytest.approx(32, rel=0.02)


def test_1200_of_2000_prompt_tokens_that_are_cached_make_it_3_98_requests_per_s() -> None:
    found = saturated([Shape((shared_prefix(0, 1200), own(i, 800)), ANSWER) for i in range(5 * SEQUENCES)])
    assert {outcome.cached_tokens for outcome in found.outcomes[1:]} == {1200}
    assert middle_rate(found) == pytest.approx(3.98, rel=0.01)


def test_4_requests_per_s_on_2_88_with_2_s_to_wait_shed_28_percent() -> None:
    """As the coordinator's admission does in a server: refused at once are those that would wait in vain."""
    service_s = 1 / 2.88
    deployment = colocated(
        1,
        LinearTimes(base_s=service_s),
        config=SchedulerConfig(token_budget=16, max_num_seqs=1),
        coordinator=CoordinatorConfig(max_wait_s=2.0, max_in_flight=1),
    )
    found = simulate(deployment, requests_at(even_poisson_times(2400, 4.0, 7), 16, 1))
    rejected = [outcome for outcome in found.outcomes if outcome.ending is Ending.REJECTED]
    assert 0.26 <= len(rejected) / len(found.outcomes) <= 0.30
    assert all(outcome.status == 429 and outcome.ended_at_s == outcome.sent_at_s for outcome in rejected)
    assert {o.ending for o in found.outcomes} == {Ending.COMPLETED, Ending.REJECTED}


def test_a_deployment_that_keeps_up_refuses_nobody() -> None:
    deployment = colocated(
        1,
        LinearTimes(base_s=0.125),
        config=SchedulerConfig(token_budget=16, max_num_seqs=1),
        coordinator=CoordinatorConfig(max_wait_s=2.0, max_in_flight=1),
    )
    found = simulate(deployment, requests_at(even_poisson_times(600, 4.0, 7), 16, 1))
    assert {outcome.ending for outcome in found.outcomes} == {Ending.COMPLETED}


def test_unbounded_queues_refuse_nobody_at_twice_the_rate() -> None:
    deployment = colocated(
        1,
        LinearTimes(base_s=0.125),
        config=SchedulerConfig(token_budget=16, max_num_seqs=1),
        coordinator=unbounded(),
    )
    found = simulate(deployment, requests_at(even_poisson_times(300, 16.0, 7), 16, 1))
    assert {outcome.ending for outcome in found.outcomes} == {Ending.COMPLETED}
    assert found.duration_s == pytest.approx(300 * 0.125, rel=0.01)
