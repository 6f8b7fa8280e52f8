"""Any requests on any small deployment: each ends once, with its tokens, in order; steps may be skipped, on cores that
workers share, too."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.simulated import LinearTimes, colocated, split

from twinpool.bench.serving.datasets.shapes import Shape, own, shared_prefix
from twinpool.bench.serving.record import Ending
from twinpool.config import CoordinatorConfig, SchedulerConfig
from twinpool.planner.deployment import Deployment
from twinpool.planner.simulator.driver import Driver
from twinpool.planner.times.service_times import Overheads

OVERHEADS = Overheads(
    request_s=0.001, control_s=0.0005, output_s=0.002, handoff_s=0.004, wake_s=0.003, busy_wake_s=0.005,
    delivery_s=0.001, delivery_token_s=2e-4,
)  # fmt: skip
SLOW_DELIVERY = replace(OVERHEADS, delivery_s=0.05)
"""Longer than a step of decode: what delays a prompt then is how much of a core it gets."""
PREFILL = LinearTimes(base_s=0.004, prompt_token_s=2e-4, start_s=1e-4, byte_s=1e-8)
DECODE = replace(PREFILL, base_s=0.008, sequence_s=3e-4, context_s=1e-6, busy_share=0.3)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    """Of a few workers with little room; what never fits is refused."""
    config = SchedulerConfig(
        token_budget=draw(st.sampled_from((None, 16, 40))),
        max_num_seqs=draw(st.sampled_from((1, 3, 16))),
        headroom_tokens=draw(st.sampled_from((0, 16))),
        prefix_cache=draw(st.booleans()),
        hybrid=draw(st.sampled_from((False, False, True))),
        grant_timeout_s=draw(st.sampled_from((0.3, 30.0))),
    )
    coordinator = CoordinatorConfig(
        max_queue_requests=draw(st.sampled_from((2, 1000))),
        max_wait_s=draw(st.sampled_from((0.3, 60.0))),
        max_in_flight=draw(st.sampled_from((None, None, 3))),
        min_link_gb_per_s=0.0,
    )
    num_blocks = draw(st.sampled_from((16, 24, 40, 200)))
    overheads = draw(
        st.sampled_from((Overheads(), OVERHEADS, SLOW_DELIVERY, Overheads(control_s=0.01, output_s=0.013)))
    )
    decode = replace(DECODE, overheads=overheads)
    prefill = replace(PREFILL, overheads=decode.overheads)
    machine = draw(st.sampled_from((None, "this")))
    if draw(st.booleans()):
        return colocated(
            draw(st.integers(1, 3)),
            decode,
            num_blocks=num_blocks,
            config=replace(config, hybrid=False),
            coordinator=coordinator,
            machine=machine,
            max_model_len=num_blocks * 16,
        )
    return split(
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        prefill,
        decode,
        num_blocks=num_blocks,
        prefill_config=config,
        decode_config=config,
        coordinator=coordinator,
        machine=machine,
        max_model_len=num_blocks * 16,
    )


@st.composite
def requests(draw: st.DrawFn) -> list[Shape]:
    """Up to 40, some of which begin alike."""
    shapes, at_s = [], 0.0
    for index in range(draw(st.integers(1, 40))):
        at_s += draw(st.sampled_from((0.0, 0.003, 0.05)))
        prefix = draw(st.sampled_from((0, 0, 24, 64)))
        first = (shared_prefix(prefix, prefix),) if prefix else ()
        own_tokens, output = draw(st.integers(1, 120)), draw(st.sampled_from((1, 2, 9, 40, 90, 200)))
        shapes.append(Shape((*first, own(index, own_tokens)), output, at_s))
    return shapes


def preempted_while_steps_are_told_of() -> tuple[Deployment, list[Shape]]:
    """A sequence that is preempted at the end of a step whose tokens are still on their way as skipping pauses."""
    config = SchedulerConfig(
        token_budget=40, max_num_seqs=16, headroom_tokens=0, prefix_cache=False, grant_timeout_s=0.3
    )
    overheads = Overheads(control_s=0.01, output_s=0.013)
    deployment = split(
        1,
        1,
        replace(PREFILL, overheads=overheads),
        replace(DECODE, overheads=overheads),
        num_blocks=24,
        prefill_config=config,
        decode_config=config,
        coordinator=CoordinatorConfig(max_wait_s=0.3, min_link_gb_per_s=0.0),
        max_model_len=24 * 16,
    )
    asked = (
        (90, 90, 0.05), (108, 200, 0.05), (36, 9, 0.05), (100, 1, 0.1), (111, 9, 0.15), (153, 2, 0.2), (15, 40, 0.2),
        (1, 2, 0.203), (60, 90, 0.206), (88, 200, 0.209), (99, 200, 0.259), (78, 1, 0.309), (50, 40, 0.359),
        (16, 40, 0.409), (117, 200, 0.412), (116, 2, 0.415), (145, 90, 0.418), (26, 2, 0.468), (126, 2, 0.471),
    )  # fmt: skip
    shapes = [
        Shape((own(index, tokens),), output, at_s) for index, (tokens, output, at_s) in enumerate(asked)
    ]
    return deployment, shapes


def steps_that_end_together_on_shared_cores() -> tuple[Deployment, list[Shape]]:
    """Three workers begin alike, so steps of two end at the moment at which the third one has nothing more to do."""
    times = LinearTimes(base_s=0.008, busy_share=0.3)
    deployment = colocated(3, times, config=SchedulerConfig(token_budget=16), machine="this")
    outputs = (90, 40, 200, 40, 90, 2, 200, 9, 40)
    return deployment, [Shape((own(index, 16),), output, 0.1) for index, output in enumerate(outputs)]


def streams_that_join_while_a_neighbour_computes_prompts() -> tuple[Deployment, list[Shape]]:
    """What the decode worker delivers, more with each stream that joins, delays the prefill worker's steps."""
    deployment = split(
        1,
        1,
        replace(PREFILL, overheads=OVERHEADS),
        replace(DECODE, overheads=OVERHEADS),
        coordinator=CoordinatorConfig(min_link_gb_per_s=0.0),
        machine="this",
    )
    shapes = [Shape((own(index, 40 + 9 * index),), 30, 0.03 * index) for index in range(12)]
    return deployment, shapes


@settings(max_examples=25, deadline=None)
@example(*preempted_while_steps_are_told_of())
@example(*steps_that_end_together_on_shared_cores())
@example(*streams_that_join_while_a_neighbour_computes_prompts())
@given(deployments(), requests())
def test_each_request_ends_once_with_its_tokens_and_nothing_is_left(
    deployment: Deployment, shapes: list[Shape]
) -> None:
    driver = Driver(deployment, shapes)
    found = driver.run()
    assert not found.warnings
    for outcome, shape in zip(found.outcomes, shapes, strict=True):
        assert outcome.ending is not None
        assert list(outcome.times) == sorted(outcome.times)
        if outcome.ending is Ending.COMPLETED:
            assert len(outcome.times) == shape.output_tokens
        else:
            assert outcome.error
            assert outcome.ending is not Ending.FAILED
    driver.core.check()
    for worker in driver.workers:
        worker.core.check()
        stats = worker.core.stats()
        assert stats.free_blocks + stats.cached_blocks == worker.pool.num_blocks
    by_steps = Driver(deployment, shapes, is_step_by_step=True).run()
    assert by_steps.as_run() == found.as_run()
    assert by_steps.workers == found.workers
    assert by_steps.attempts_lost == found.attempts_lost
