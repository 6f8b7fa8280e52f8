"""Random work on random deployments: every way of serving gives the same tokens, and all is free after."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_model import EOS, VOCABULARY, answer
from support.pool_world import World

from twinpool.config import Role, SchedulerConfig
from twinpool.metrics import WorkerMetric
from twinpool.request import FinishReason, Job, SamplingParams

SPLIT = {Role.PREFILL: 2, Role.DECODE: 2}
COLOCATED = {Role.COLOCATED: 1}


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """A few jobs, some of which share a prefix or ask for one token only."""
    common = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=0, max_size=14))
    result = []
    for number in range(draw(st.integers(1, 7))):
        own = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=18))
        prompt = (*common, *own) if draw(st.booleans()) else tuple(own)
        sampling = SamplingParams(
            max_tokens=draw(st.integers(1, 24)),
            seed=0,
            min_tokens=draw(st.sampled_from([0, 0, 3])),
            ignore_eos=draw(st.booleans()),
        )
        result.append(Job(f"request-{number}", 0, prompt, sampling, (EOS,)))
    return result


@st.composite
def worlds(draw: st.DrawFn, num_workers: dict[Role, int]) -> World:
    """A deployment with settings that hurt: pools that hardly hold two sequences, odd chunks, few slots."""
    config = SchedulerConfig(
        token_budget=draw(st.sampled_from([1, 3, 7, 64])),
        max_num_seqs=draw(st.sampled_from([1, 3, 8])),
        headroom_tokens=draw(st.sampled_from([0, 1, 6])),
        max_parked_blocks=draw(st.sampled_from([None, 1, 8])),
        prefix_cache=draw(st.booleans()),
    )
    return World(
        draw(st.integers(0, 1 << 32)),
        num_workers,
        num_blocks=draw(st.sampled_from([15, 20, 60])),
        block_size=draw(st.sampled_from([4, 5])),
        config=config,
        is_one_sided=draw(st.booleans()),
    )


def serve(world: World, work: list[Job], gap: int) -> None:
    """Submits the jobs some turns apart and sees every one to its end."""
    clients = []
    for job in work:
        clients.append(world.submit(job))
        for _ in range(world.random.randrange(gap + 1)):
            world.turn()
    world.run()
    for client in clients:
        assert client.output == answer(client.job)
        assert client.finish in (FinishReason.STOP, FinishReason.LENGTH)
    assert all(not worker.core.counters[WorkerMetric.TRANSFER_FAILURES] for worker in world.workers.values())
    world.assert_everything_is_free()


@settings(max_examples=120, deadline=None)
@given(worlds(SPLIT), jobs(), st.sampled_from([0, 20, 200]))
def test_split_pools_give_every_request_its_answer(world: World, work: list[Job], gap: int) -> None:
    serve(world, work, gap)


@settings(max_examples=120, deadline=None)
@given(worlds(COLOCATED), jobs(), st.sampled_from([0, 20, 200]))
def test_a_colocated_worker_gives_every_request_its_answer(world: World, work: list[Job], gap: int) -> None:
    serve(world, work, gap)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_clients_that_leave_and_workers_that_die_disturb_nobody_else(data: st.DataObject) -> None:
    world = data.draw(worlds(data.draw(st.sampled_from([SPLIT, COLOCATED]))))
    clients = []
    for job in data.draw(jobs()):
        clients.append(world.submit(job))
        for _ in range(data.draw(st.integers(0, 60))):
            world.turn()
        if data.draw(st.sampled_from([False, False, True])):
            world.cancel(world.random.choice(clients))
        if data.draw(st.sampled_from([False, False, False, True])):
            world.kill(world.random.choice(list(world.workers.values())))
        for wire in [wire for worker in world.workers.values() for wire in worker.wires.values()]:
            wire.num_to_corrupt = data.draw(st.sampled_from([0, 0, 0, 0, 1]))
    world.run()
    for client in clients:
        whole = answer(client.job)
        if client.finish is FinishReason.CANCELLED:
            assert client.output == whole[: len(client.output)]
        else:
            assert client.output == whole
    world.assert_everything_is_free()


@settings(max_examples=120, deadline=None)
@given(st.data(), worlds(SPLIT), jobs())
def test_messages_between_workers_that_are_lost_cost_time_and_no_block(
    data: st.DataObject, world: World, work: list[Job]
) -> None:
    clients = []
    for job in work:
        clients.append(world.submit(job))
        world.num_to_lose = data.draw(st.integers(0, 3))
        for _ in range(data.draw(st.integers(0, 60))):
            world.turn()
        if data.draw(st.booleans()):
            world.cancel(world.random.choice(clients))
    world.num_to_lose = 0
    world.run()
    world.wait(3 * SchedulerConfig().transfer_timeout_s)  # a lease, a reminder, and another
    for client in clients:
        whole = answer(client.job)
        wanted = whole[: len(client.output)] if client.finish is FinishReason.CANCELLED else whole
        assert client.output == wanted
    world.assert_everything_is_free()


@settings(max_examples=120, deadline=None)
@given(worlds({Role.PREFILL: 1, Role.DECODE: 1}), st.sampled_from([0.01, 0.05, 0.2]))
def test_a_storm_of_clients_that_leave_and_ask_again_leaves_nothing_behind(world: World, rate: float) -> None:
    random, clients = world.random, []
    for number in range(40):
        if number < 4 or random.random() < 0.5:
            prompt = tuple(random.choices(range(VOCABULARY), k=random.randint(1, 30)))
            sampling = SamplingParams(max_tokens=random.randint(1, 12), seed=0)
            clients.append(world.submit(Job(f"request-{number}", 0, prompt, sampling, (EOS,))))
        while world.turn() and random.random() > rate:
            pass
        world.cancel(random.choice(clients))
    world.run()
    for client in clients:
        assert client.output == answer(client.job)[: len(client.output)]
        assert client.finish is FinishReason.CANCELLED or client.output == answer(client.job)
    world.assert_everything_is_free()
