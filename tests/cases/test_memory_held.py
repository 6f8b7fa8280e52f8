"""Memory held: whoever leaves, refuses or dies, every KV block is back in a second. Ids as in `README.md`."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.fleet import NUM_SLOTS, assert_returned, is_colocated, num_busy
from support.server import Server, wait_for
from support.visitors import Visit, Visitor, ask, stream
from world.client import Ask, Parting
from world.model import VOCABULARY
from world.scenario import Fault, FaultKind, Scenario
from world.world import World

from twinpool.config import CoordinatorConfig, Role, SchedulerConfig
from twinpool.metrics import WorkerMetric
from twinpool.request import SamplingParams

RETURN_LIMIT_S = 5.0
"""A second is promised, and a heartbeat shows it half a second later; the rest is for a machine that is busy."""
STATES = ("queued", "prefilling", "transferring", "decoding")
ENDS = ("cancelled", "completed")
"""Of one whose client leaves; completed: it was over before the server noticed."""
TRIES = 60
LONG_PROMPT = {"prompt": list(range(10, 300)) * 2, "max_tokens": 400, "ignore_eos": True}
LONG_ANSWER = {"prompt": "A long story", "max_tokens": 900, "ignore_eos": True}
ONE_OF_EACH = {Role.PREFILL: 1, Role.DECODE: 1}
JOINED_S = 0.2
"""In virtual time workers have joined by then."""


def leave_in(state: str, visitor: Visitor) -> bool:
    """Leaves as soon as `state` is seen; whether it was still in it when the server noticed."""
    visitor.wait_until(state)
    visitor.leave()
    visitor.wait_until(*ENDS)
    return visitor.states()[-3:] == [state, "draining", "cancelled"]


def leave_several_answers(visitor: Visitor, num_answers: int) -> bool:
    """Leaves as soon as each answer was seen to be under way; whether the server noticed before any was over."""

    def were_all_in(*states: str) -> bool:
        each = visitor.states_of_each()
        return len(each) == num_answers and all(not set(states).isdisjoint(one) for one in each)

    wait_for("all answers are, or were, under way", lambda: were_all_in("decoding"))
    visitor.leave()
    wait_for("all have ended", lambda: were_all_in(*ENDS))
    return {states[-1] for states in visitor.states_of_each()} == {"cancelled"}


@pytest.mark.parametrize("state", STATES)
def test_blocks_stay_when_a_client_leaves(anywhere: Server, visit: Visit, state: str) -> None:
    """M1, M10: a client leaves after prefill and before decode, or in any other state, and its blocks stay until some
    long timer, while nobody has stopped the work."""
    if state == "transferring" and is_colocated(anywhere):
        pytest.skip("nothing is transferred within one worker")
    ahead: list[Visitor] = []
    if state == "queued":
        ahead = [visit(anywhere, **LONG_ANSWER) for _ in range(2 * NUM_SLOTS)]
        for visitor in ahead:
            visitor.wait_until("prefilling")
    wanted = LONG_PROMPT if state in ("prefilling", "transferring") else LONG_ANSWER
    tries = (visit(anywhere, cache_salt=uuid.uuid4().hex, **wanted) for _ in range(TRIES))
    assert any(leave_in(state, visitor) for visitor in tries), "the state is too short"
    for visitor in ahead:
        visitor.leave()
    assert_returned(anywhere, RETURN_LIMIT_S)
    wait_for("nobody computes for those who left", lambda: num_busy(anywhere) == 0)
    assert stream(anywhere, prompt="Still there?", max_tokens=4, ignore_eos=True).finish == "length"


def test_blocks_are_orphaned_when_a_client_leaves_in_mid_transfer(split: Server, visit: Visit) -> None:
    """M8, M11, C2: left at 0, 25, 50, 75 and 100 % of the transfer, a few at a time and 67 times on each transport, so
    200 times in all; then the next request hangs, or bookkeeping has leaked."""
    fields = {"prompt": list(range(10, 298)), "max_tokens": 200, "ignore_eos": True}
    whole = visit(split, cache_salt="measured", **fields)
    whole.wait_until("decoding")
    stamps = {entry["state"]: entry["at_s"] for entry in whole.timeline()["states"]}
    transfer_s = stamps["decoding"] - stamps["prefilling"]
    whole.leave()

    def leave_at(number: int) -> None:
        visitor = visit(split, cache_salt=str(number), **fields)
        visitor.read_for(transfer_s * (number % 5) / 4)
        visitor.leave()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave_at, range(67)))
    assert_returned(split, RETURN_LIMIT_S)
    assert stream(split, prompt="Still there?", max_tokens=8, ignore_eos=True).finish == "length"


def test_blocks_stay_in_a_queue_where_nobody_looks(anywhere: Server, visit: Visit) -> None:
    """M14: more prompts than fit wait at the coordinator, at prefill (queued and parked) and at decode; their clients
    all leave at once, and are found in every one of these queues."""
    leavers = [visit(anywhere, cache_salt=str(n), **LONG_PROMPT) for n in range(12)]
    leavers[0].wait_until("transferring", "decoding")
    leavers[6].wait_until("queued")
    for visitor in leavers:
        visitor.leave()
    for visitor in leavers:
        visitor.wait_until(*ENDS)
    late = {visitor.states()[-1] for visitor in leavers[6:]}
    assert late == {"cancelled"}  # there is no room for two at once
    assert_returned(anywhere, RETURN_LIMIT_S)


def test_what_can_never_fit_waits_for_the_full_timeout(anywhere: Server) -> None:
    """M13: the prompt, or what it may grow to, is larger than the pool: refused at once, with the reason and both
    numbers."""
    for fields in ({"prompt": [5] * 1100, "max_tokens": 1}, {"prompt": [5] * 1000, "max_tokens": 500}):
        refused = ask(anywhere, **fields)
        assert refused.status == 400
        assert "1024" in refused.error
        assert str(len(fields["prompt"])) in refused.error


def test_a_child_of_a_request_for_several_answers_is_left(anywhere: Server, visit: Visit) -> None:
    """M6: the prompt's KV has several readers. One answer ends long before the others, and then all are left."""
    fields = {"prompt": list(range(10, 110)), "n": 3, "temperature": 1, "seed": 5, "ignore_eos": True}

    def answers(**more: Any) -> list[dict[str, Any]]:
        body = {"max_tokens": 24, "return_token_ids": True, **fields, **more}
        response = httpx.post(f"{anywhere.url}/v1/completions", json=body, timeout=60)
        choices: list[dict[str, Any]] = response.json()["choices"]
        return choices

    first, *others = (choice["token_ids"] for choice in answers())
    only_first = next(token for token in first if not any(token in ids for ids in others))
    stopped = answers(stop_token_ids=[only_first])
    assert [choice["finish_reason"] for choice in stopped] == ["stop", "length", "length"]
    assert [choice["token_ids"] for choice in stopped[1:]] == others
    assert_returned(anywhere, RETURN_LIMIT_S)
    visitors = (visit(anywhere, max_tokens=900, **fields) for _ in range(TRIES))
    assert any(leave_several_answers(visitor, 3) for visitor in visitors), "the answers are too short"
    assert_returned(anywhere, RETURN_LIMIT_S)


def test_decode_refuses_and_prefill_keeps_its_blocks(broken: Server) -> None:
    """M2: many hand-overs are refused, because bytes are wrong or missing. The blocks of a refused one are back before
    the request's next attempt ends, not after a timer."""
    fields = {"max_tokens": 8, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        prompts = [list(range(10 + n, 74 + n)) for n in range(12)]
        answers = list(pool.map(lambda prompt: ask(broken, prompt=prompt, **fields), prompts))
    assert {answer.finish for answer in answers} == {"length"}
    wait_for("refusals", lambda: broken.metric("twinpool_kv_transfer_failures_total") > 0, RETURN_LIMIT_S)
    assert_returned(broken, RETURN_LIMIT_S)


# ── the cores, in virtual time; one-sided as shared memory is, or not, as sockets are ────────────────────────


def request(name: str, num_prompt: int = 12, max_tokens: int = 5, first: int = 1, **fields: Any) -> Ask:
    prompt = tuple((first + n * 7) % VOCABULARY for n in range(num_prompt))
    return Ask(name, JOINED_S, prompt, SamplingParams(max_tokens, seed=0, ignore_eos=True), **fields)


def joined(seed: int, **settings: Any) -> World:
    """A world of one worker of each pool, which have joined and are linked."""
    world = World(Scenario(seed, ONE_OF_EACH, **settings))
    world.run_until_s(JOINED_S)
    return world


@pytest.mark.parametrize("is_one_sided", [True, False])
def test_a_timeout_in_the_very_step_that_completes_prefill_keeps_blocks(is_one_sided: bool) -> None:
    """M3: the client gives up at the event with which prefill's first token arrives, the one before or the one after,
    and asks again, and gives up again: 500 times for each kind of transport."""
    for seed in range(56):
        world = joined(seed, num_blocks=12, is_one_sided=is_one_sided)
        undisturbed = world.submit(request("undisturbed"))
        first_token_at = 0
        while not undisturbed.num_emitted:
            world.step()
            first_token_at += 1
        for offset in (-1, 0, 1):
            world = joined(seed, num_blocks=12, is_one_sided=is_one_sided)
            for retry in range(3):
                client = world.submit(request(f"{offset}-{retry}", first=1 + retry, parting=Parting.LEAVES))
                for _ in range(first_token_at + offset):
                    world.step()
                client.part()
            last = world.submit(request("last", first=9))
            world.run()  # to the end, at which everything is free
            assert last.is_answered


@pytest.mark.parametrize("is_one_sided", [True, False])
def test_blocks_expire_in_a_queue_that_is_longer_than_the_lease(is_one_sided: bool) -> None:
    """M7: prompts wait for prefill many leases long, with decode's blocks reserved for them. The reservations are
    renewed from their grant on, so that none expires, and nobody reads what another has written there since."""
    config = SchedulerConfig(token_budget=1, headroom_tokens=4, transfer_timeout_s=0.4)
    world = joined(1, num_blocks=60, workers=config, is_one_sided=is_one_sided, step_s=(0.02, 0.02))
    clients = [world.submit(request(f"request-{n}", 24, first=n)) for n in range(6)]
    while not all(client.is_over for client in clients):
        world.step()
    assert world.schedule.now > 5 * config.transfer_timeout_s
    assert all(client.is_answered for client in clients)
    counters = [worker.core.counters for worker in world.workers.values()]
    assert sum(counts[WorkerMetric.EXPIRED] for counts in counters) == 0
    world.run()  # to the end, at which everything is free


@pytest.mark.parametrize("is_one_sided", [True, False])
def test_a_worker_that_died_silently_keeps_the_blocks_that_decode_reserved_for_it(is_one_sided: bool) -> None:
    """M4, M9: nobody tells decode that its writer is frozen, and no new work comes. Its own timer takes the grant back,
    once the lease is over; the blocks are free once the writer is known dead."""
    world = joined(
        2,
        num_blocks=20,
        workers=SchedulerConfig(token_budget=1, headroom_tokens=4, transfer_timeout_s=0.5),
        coordinator=CoordinatorConfig(heartbeat_s=0.2, lease_s=0.9),
        is_one_sided=is_one_sided,
    )
    client = world.submit(request("left alone", 24))
    (decode,) = world.of_role(Role.DECODE)
    while not decode.core.stats().leased_blocks:
        world.step()
    frozen_at = world.schedule.now
    world.strike(Fault(frozen_at, FaultKind.FREEZE, which=0, for_s=60.0))
    while decode.core.stats().leased_blocks:
        world.step()
    assert world.schedule.now - frozen_at <= 2 * 0.5
    assert decode.core.counters[WorkerMetric.EXPIRED] == 1
    world.run()  # to the end, at which everything is free
    assert client.is_answered
