"""What happens in simulated deployments: conservation, determinism, isolation, transfers, caches, shared machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.simulated import LAYOUT, LinearTimes, colocated, poisson_times, requests_at, split

from twinpool.bench.serving.datasets.shapes import Shape, hashed, own, shared_prefix
from twinpool.bench.serving.record import Ending
from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.errors import ConfigError
from twinpool.metrics import WorkerMetric
from twinpool.planner.deployment import Deployment
from twinpool.planner.simulator.driver import Driver, simulate
from twinpool.planner.simulator.outcomes import Outcome, Simulation
from twinpool.planner.simulator.speed import digest
from twinpool.planner.times.service_times import Overheads

PREFILL = LinearTimes(base_s=0.005, prompt_token_s=1e-4)
DECODE = LinearTimes(base_s=0.01, sequence_s=2e-4)
BOTH = LinearTimes(base_s=0.01, sequence_s=2e-4, prompt_token_s=1e-4)


def gaps(outcome: Outcome) -> list[float]:
    return [after - before for before, after in zip(outcome.times, outcome.times[1:], strict=False)]


def mixed(num_requests: int, rate_per_s: float, seed: int) -> list[Shape]:
    """Short and long, with and without shared beginnings."""
    times = poisson_times(num_requests, rate_per_s, seed)
    return [
        Shape(
            (*((shared_prefix(i % 3, 64 + 16 * (i % 5)),) if i % 2 else ()), own(i, 30 + 37 * (i % 11))),
            1 + (i * 7) % 40,
            at_s,
            f"group-{i % 2}",
        )
        for i, at_s in enumerate(times)
    ]


DEPLOYMENTS: dict[str, Deployment] = {
    "1P1D": split(1, 1, PREFILL, DECODE),
    "2P3D": split(2, 3, PREFILL, DECODE),
    "2P2D, little room": split(
        2, 2, PREFILL, DECODE, num_blocks=48, max_model_len=700, decode_config=SchedulerConfig(max_num_seqs=8)
    ),
    "1P1D hybrid": split(
        1, 1, PREFILL, BOTH, prefill_config=SchedulerConfig(hybrid=True), decode_config=SchedulerConfig(hybrid=True)
    ),
    "1P1D on one machine": split(
        1,
        1,
        LinearTimes(base_s=0.005, prompt_token_s=1e-4, busy_share=0.3),
        LinearTimes(base_s=0.01, sequence_s=2e-4, busy_share=0.2),
        machine="this",
    ),
    "1P1D, slow link": split(
        1,
        1,
        LinearTimes(base_s=0.005, prompt_token_s=1e-4, start_s=1e-3, byte_s=1e-7),
        LinearTimes(base_s=0.01, sequence_s=2e-4, start_s=1e-3, byte_s=1e-7),
        coordinator=CoordinatorConfig(min_link_gb_per_s=0.0),
    ),
    "2 colocated": colocated(2, BOTH),
    "2 colocated, little room": colocated(2, BOTH, num_blocks=48, max_model_len=700),
}  # fmt: skip


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_request_ends_once_with_the_tokens_it_asked_for_and_nothing_is_left(name: str) -> None:
    shapes = mixed(80, 12.0, 5)
    driver = Driver(DEPLOYMENTS[name], shapes)
    found = driver.run()
    assert not found.warnings
    assert [outcome.ending for outcome in found.outcomes] == [Ending.COMPLETED] * len(shapes)
    assert [len(outcome.times) for outcome in found.outcomes] == [shape.output_tokens for shape in shapes]
    for outcome in found.outcomes:
        assert list(outcome.times) == sorted(outcome.times)
        assert outcome.intended_at_s <= outcome.sent_at_s < outcome.times[0]
        assert outcome.ended_at_s == outcome.times[-1]
    for worker in driver.workers:
        stats = worker.core.stats()
        worker.core.check()
        assert stats.free_blocks + stats.cached_blocks == worker.pool.num_blocks
        assert (stats.waiting, stats.running, stats.leased_blocks, stats.quarantined_blocks) == (0, 0, 0, 0)
    counted = sum(worker.counters.get(WorkerMetric.OUTPUT_TOKENS, 0) for worker in found.workers)
    assert counted >= sum(shape.output_tokens for shape in shapes)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_step_by_step_it_is_the_same_to_the_last_bit(name: str) -> None:
    """Whose batches change often, and hardly ever."""
    for shapes in (mixed(50, 12.0, 8), requests_at([0.0, 0.01, 0.02, 1.5], 60, 150)):
        found = simulate(DEPLOYMENTS[name], shapes)
        by_steps = simulate(DEPLOYMENTS[name], shapes, is_step_by_step=True)
        assert by_steps.as_run() == found.as_run()
        assert by_steps.workers == found.workers
        assert by_steps.attempts_lost == found.attempts_lost
        assert by_steps.mean_in_flight == found.mean_in_flight
        assert by_steps.num_events >= found.num_events


def test_where_room_is_short_sequences_are_preempted_and_go_on() -> None:
    deployment = colocated(
        1, BOTH, num_blocks=24, max_model_len=380, config=SchedulerConfig(headroom_tokens=0)
    )
    found = simulate(deployment, requests_at([0.0, 0.01, 0.02, 0.03], 60, 120))
    assert found.attempts_lost["preempted"] >= 1
    assert [len(outcome.times) for outcome in found.outcomes] == [120] * 4
    assert max(outcome.num_attempts for outcome in found.outcomes) >= 2


def test_the_same_requests_give_the_same_run() -> None:
    one, other = (simulate(DEPLOYMENTS["2P3D"], mixed(60, 12.0, 6)) for _ in range(2))
    assert one.as_run() == other.as_run()
    assert one.workers == other.workers
    assert one.num_events == other.num_events


PROGRAM = """
from test_simulator_runs import DEPLOYMENTS, mixed
from twinpool.planner.simulator.driver import simulate
from twinpool.planner.simulator.speed import digest
print(digest(simulate(DEPLOYMENTS["2P3D"], mixed(40, 12.0, 6)).outcomes))
"""


def test_it_is_the_same_in_every_process() -> None:
    """Whatever seed the process hashes strings with: pytest's own is drawn."""
    here = Path(__file__).resolve()
    paths = [here.parents[2] / "src", here.parents[1], here.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONHASHSEED": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == digest(simulate(DEPLOYMENTS["2P3D"], mixed(40, 12.0, 6)).outcomes)


def with_a_long_prompt(deployment: Deployment, *, is_there: bool) -> Sequence[Outcome]:
    """Streams that run while a prompt of 4,000 tokens comes, or does not."""
    shapes = requests_at([0.0, 0.05, 0.1], 64, 100)
    if is_there:
        shapes.append(Shape((own(99, 4000),), 1, 0.6))
    return simulate(deployment, shapes).outcomes[:3]


def test_a_long_prompt_changes_no_gap_of_a_stream_on_its_own_pool() -> None:
    deployment = split(1, 1, PREFILL, DECODE)
    alone = with_a_long_prompt(deployment, is_there=False)
    beside = with_a_long_prompt(deployment, is_there=True)
    assert [outcome.times for outcome in beside] == [outcome.times for outcome in alone]


def test_a_long_prompt_makes_gaps_longer_on_colocated_workers_and_on_a_shared_machine() -> None:
    shared = split(1, 1, PREFILL, LinearTimes(base_s=0.01, sequence_s=2e-4, busy_share=0.5), machine="this")
    both = colocated(1, BOTH, config=SchedulerConfig(token_budget=512))
    for deployment in (both, shared):
        alone, beside = (
            max(
                gap
                for outcome in with_a_long_prompt(deployment, is_there=there)
                for gap in gaps(outcome)[40:]
            )
            for there in (False, True)
        )
        assert beside > 1.4 * alone


def test_a_step_is_slower_exactly_while_another_worker_of_its_machine_computes() -> None:
    """A decode step of 0.1 s; the other worker computes a prompt of 0.05 s beside it, which slows both down by half."""
    prefill = LinearTimes(prompt_token_s=0.05 / 32, busy_share=0.5)
    decode = LinearTimes(base_s=0.1, busy_share=0.5)
    deployment = split(1, 1, prefill, decode, machine="this")
    first, second = simulate(
        deployment, [Shape((own(0, 32),), 4, 0.0), Shape((own(1, 32),), 1, 0.17)]
    ).outcomes
    assert first.times[0] == pytest.approx(0.05)
    assert first.times[1] == pytest.approx(0.15)  # alone
    assert second.times[0] == pytest.approx(0.17 + 0.075)  # wholly beside it
    assert first.times[2] == pytest.approx(0.25 + 0.075 / 3)  # 0.075 s of work at two thirds of the speed
    assert first.times[3] == pytest.approx(first.times[2] + 0.1)


@pytest.mark.parametrize(("delivery_s", "takes_s"), [(0.0, 0.1), (0.001, 0.111), (0.05, 0.2)])
def test_delivering_takes_of_a_prompts_core_what_it_needs_and_half_at_most(
    delivery_s: float, takes_s: float
) -> None:
    """Steps of decode end every 0.01 s while a prompt computes for 0.1 s: ten, and one more meanwhile."""
    overheads = Overheads(delivery_s=delivery_s)
    prefill = LinearTimes(base_s=0.1, overheads=overheads)
    decode = LinearTimes(base_s=0.01, overheads=overheads)
    shapes = [Shape((own(0, 32),), 60, 0.0), Shape((own(1, 32),), 1, 0.205)]
    _, second = simulate(split(1, 1, prefill, decode, machine="this"), shapes).outcomes
    assert second.times[0] == pytest.approx(0.205 + takes_s)


def over_a_link_of(seconds: float, num_prefill: int = 1) -> Deployment:
    """KV of 256 tokens takes so long over it alone. Prompts of 256 are computed in two steps of 0.05 s: in the first,
    decode has yet to grant room."""
    byte_s = seconds / (16 * LAYOUT.block_bytes)
    prefill = LinearTimes(prompt_token_s=0.1 / 256, byte_s=byte_s)
    decode = LinearTimes(base_s=0.02, byte_s=byte_s)
    return split(
        num_prefill,
        1,
        prefill,
        decode,
        prefill_config=SchedulerConfig(token_budget=128),
        coordinator=CoordinatorConfig(min_link_gb_per_s=0.0),
    )


def test_layers_travel_while_the_prompt_is_computed() -> None:
    """The first half goes while the second step runs, and so do all layers but the last of the second half."""
    (outcome,) = simulate(over_a_link_of(0.04), requests_at([0.0], 256, 3)).outcomes
    assert outcome.times[0] == pytest.approx(0.1)
    assert outcome.times[1] == pytest.approx(0.1 + 0.02 / LAYOUT.num_layers + 0.02)


def test_a_link_that_is_slower_than_the_prompt_is_what_the_second_token_waits_for() -> None:
    """It is busy from the end of the first step on."""
    (outcome,) = simulate(over_a_link_of(0.4), requests_at([0.0], 256, 3)).outcomes
    assert outcome.times[1] == pytest.approx(0.05 + 0.4 + 0.02)


def test_two_senders_share_what_their_receiver_can_take() -> None:
    one, other = simulate(over_a_link_of(0.4, num_prefill=2), requests_at([0.0, 0.0], 256, 2)).outcomes
    assert one.workers[0] != other.workers[0]
    # Halves come in turn: of the one, of the other, and again.
    assert sorted((one.times[1], other.times[1])) == pytest.approx([0.05 + 0.6 + 0.02, 0.05 + 0.8 + 0.02])


def test_overheads_are_where_they_belong() -> None:
    overheads = Overheads(
        request_s=0.01, prompt_token_s=1e-4, control_s=0.002, output_s=0.005, handoff_s=0.03
    )
    prefill = LinearTimes(base_s=0.1, overheads=overheads)
    decode = LinearTimes(base_s=0.05, overheads=overheads)
    (outcome,) = simulate(split(1, 1, prefill, decode), requests_at([1.0], 100, 3)).outcomes
    arrives_s = 1.0 + 0.01 + 100 * 1e-4
    prefilled_s = arrives_s + 0.002 + 0.1
    assert outcome.times[0] == pytest.approx(prefilled_s + 0.005)
    joins_s = prefilled_s + 0.002 + 0.03  # the seal's way, then what a transfer takes beside its bytes
    assert outcome.times[1] == pytest.approx(joins_s + 0.05 + 0.005)
    assert outcome.times[2] == pytest.approx(outcome.times[1] + 0.05)
    assert outcome.stages_us["tokenize"] == 20_000
    record = outcome.record()
    assert record.timeline is not None
    told_s = sum(stage.duration_s for stage in record.timeline.stages)
    assert told_s == pytest.approx(outcome.times[0] - 1.0, abs=1e-5)


def test_a_step_after_its_worker_had_nothing_to_do_takes_longer() -> None:
    overheads = Overheads(wake_s=0.02, busy_wake_s=0.5)
    times = LinearTimes(base_s=0.1, overheads=overheads)
    first, second, later = simulate(split(1, 1, times, times), requests_at([0.0, 0.01, 3.0], 32, 3)).outcomes
    # Each prompt is a step of its own; the second one waits for the first one's, so its worker has not slept.
    assert first.times[0] == pytest.approx(0.12)
    assert second.times[0] == pytest.approx(0.22)
    assert later.times[0] == pytest.approx(3.12)
    assert later.times[1] - later.times[0] == pytest.approx(0.12)
    assert later.times[2] - later.times[1] == pytest.approx(0.1)


def test_a_cached_prefix_saves_exactly_its_blocks() -> None:
    shapes = [Shape((shared_prefix(0, 100), own(i, 60)), 2, float(i)) for i in range(4)]
    found = simulate(split(1, 1, PREFILL, DECODE), shapes)
    assert [outcome.cached_tokens for outcome in found.outcomes] == [0, 96, 96, 96]
    first, *others = (outcome.times[0] - outcome.sent_at_s for outcome in found.outcomes)
    assert others == pytest.approx([first - 96 * PREFILL.prompt_token_s] * 3)
    prefill = next(worker for worker in found.workers if worker.role is Role.PREFILL)
    assert prefill.counters[WorkerMetric.PROMPT_TOKENS_COMPUTED] == 4 * 160 - 3 * 96
    assert prefill.counters[WorkerMetric.BLOCKS_SKIPPED] == 3 * 6  # decode holds them, too


def test_blocks_of_a_trace_are_shared_by_their_hash_ids() -> None:
    one = Shape(hashed((1, 2, 3), 80, 32), 2, 0.0, hash_ids=(1, 2, 3))
    two = Shape(hashed((1, 2, 4), 80, 32), 2, 1.0, hash_ids=(1, 2, 4))
    other = Shape(hashed((5, 2, 3), 80, 32), 2, 2.0, hash_ids=(5, 2, 3))
    found = simulate(split(1, 1, PREFILL, DECODE), [one, two, other])
    assert [outcome.cached_tokens for outcome in found.outcomes] == [0, 64, 0]


def test_without_a_prefix_cache_nothing_is_saved() -> None:
    config = SchedulerConfig(prefix_cache=False)
    deployment = split(1, 1, PREFILL, DECODE, prefill_config=config, decode_config=config)
    shapes = [Shape((shared_prefix(0, 100), own(i, 60)), 2, float(i)) for i in range(3)]
    assert [outcome.cached_tokens for outcome in simulate(deployment, shapes).outcomes] == [0, 0, 0]


def test_closed_loops_and_bounds_keep_so_many_requests_in_flight() -> None:
    shapes = [Shape((own(i, 64),), 20) for i in range(30)]
    found = simulate(split(1, 1, PREFILL, DECODE), shapes, num_clients=4)
    assert _most_at_once(found) == 4
    assert all(outcome.intended_at_s == outcome.sent_at_s for outcome in found.outcomes)
    timed = requests_at([0.01 * i for i in range(30)], 64, 20)
    found = simulate(split(1, 1, PREFILL, DECODE), timed, max_concurrency=3)
    assert _most_at_once(found) == 3
    assert [outcome.intended_at_s for outcome in found.outcomes] == [shape.at_s for shape in timed]
    assert found.outcomes[-1].sent_at_s > found.outcomes[-1].intended_at_s


def _most_at_once(simulation: Simulation) -> int:
    moves = [(outcome.sent_at_s, 1) for outcome in simulation.outcomes]
    moves += [(outcome.ended_at_s, -1) for outcome in simulation.outcomes]
    running = most = 0
    for _, change in sorted(moves):
        running += change
        most = max(most, running)
    return most


def test_answers_of_one_token_take_no_place_in_flight() -> None:
    """When the one place comes free all of them go at once, not one by one as something else happens."""
    shapes = [Shape((own(0, 64),), 50, 0.0), *requests_at([0.1, 0.11, 0.12, 0.13], 16, 1)]
    deployment = split(4, 1, PREFILL, DECODE, coordinator=CoordinatorConfig(max_in_flight=1))
    long, *short = simulate(deployment, shapes).outcomes
    assert {len(outcome.workers) for outcome in short} == {2}
    starts_s = [outcome.sent_at_s + outcome.queue_s for outcome in short]
    assert starts_s == pytest.approx([long.times[-1]] * 4, abs=1e-5)


@pytest.mark.parametrize("deployment", [split(1, 1, PREFILL, DECODE), colocated(1, BOTH)], ids=("1P1D", "1C"))
def test_steps_in_which_nothing_happens_are_no_events(deployment: Deployment) -> None:
    found = simulate(deployment, requests_at([0.0, 0.01, 0.02], 60, 900))
    assert found.num_events < sum(worker.num_steps for worker in found.workers) / 2


def test_a_long_pause_costs_nothing_and_changes_nothing() -> None:
    shapes = requests_at([0.0, 86_400.0], 64, 10)
    found = simulate(split(1, 1, PREFILL, DECODE), shapes)
    one, other = ([at_s - outcome.sent_at_s for at_s in outcome.times] for outcome in found.outcomes)
    assert other == pytest.approx(one, abs=1e-9)
    assert found.num_events < 500


def test_what_never_fits_is_refused_with_a_reason() -> None:
    shapes = [Shape((own(0, 100),), 10, 0.0), Shape((own(1, 900),), 200, 0.1)]
    fits, too_long = simulate(split(1, 1, PREFILL, DECODE, max_model_len=1000), shapes).outcomes
    assert fits.ending is Ending.COMPLETED
    assert (too_long.ending, too_long.status) == (Ending.REJECTED, 400)
    assert "maximum context length is 1000" in too_long.error


def test_ctrl_c_keeps_what_was_seen() -> None:
    def stop(num_ended: int, _: float) -> None:
        if num_ended == 5:
            raise KeyboardInterrupt

    found = simulate(split(1, 1, PREFILL, DECODE), mixed(20, 10.0, 1), on_progress=stop)
    run = found.as_run()
    assert run.was_interrupted
    assert 5 < len(run.requests) < 20  # those that were sent
    assert max(record.sent_at_s for record in run.requests) <= run.duration_s
    endings = [record.ending for record in run.requests]
    assert endings.count(Ending.COMPLETED) >= 5
    assert set(endings) == {Ending.COMPLETED, Ending.CANCELLED}


@pytest.mark.parametrize(
    ("shapes", "flags", "words"),
    [
        ([], {}, "the number of requests is 0"),
        ([Shape((own(0, 4),), 2)], {}, "1 of 1 requests have no time to come at"),
        ([Shape((own(0, 4),), 2, 0.0)], {"num_clients": 0}, "--num-clients is 0"),
        ([Shape((own(0, 4),), 2, 0.0)], {"num_clients": 1, "max_concurrency": 1}, "is a closed loop"),
    ],
)
def test_what_cannot_be_simulated_is_told(shapes: list[Shape], flags: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(DEPLOYMENTS["1P1D"], shapes, **flags)  # type: ignore[arg-type]


def test_a_short_prompt_does_not_overtake_a_long_one_on_the_way_to_the_coordinator() -> None:
    """One process reads them, in the order in which they were sent."""
    overheads = Overheads(request_s=0.001, prompt_token_s=1e-5)
    prefill = LinearTimes(base_s=0.005, prompt_token_s=1e-4, overheads=overheads)
    shapes = [Shape((own(0, 500),), 2, 0.0), Shape((own(1, 20),), 2, 0.0005)]
    long, short = simulate(split(1, 1, prefill, DECODE), shapes).outcomes
    assert long.times[0] == pytest.approx(0.001 + 0.005 + 0.005 + 0.05)
    assert short.times[0] > long.times[0]
