"""Tenants that compete are served tokens in proportion to their weights, whatever they send."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_server import SimulatedServer

from twinpool.coordinator.tenants import Tenant
from twinpool.metrics import CoordinatorMetric

LONGEST_PROMPT = 60
FLOOD = {"max_queue_requests": 1000, "max_wait_s": 1e6}
weights = st.sampled_from(((1.0, 1.0), (1.0, 3.0), (0.5, 1.0, 4.0)))


def flood(server: SimulatedServer, tenants: list[Tenant], rng: random.Random, num_each: int) -> None:
    """So many requests of each tenant at once, one tenant after the other."""
    server.driver.now = 1.0
    for tenant in tenants:
        for i in range(num_each):
            num_prompt = rng.randint(1, LONGEST_PROMPT)
            server.arrive(f"{tenant.name}-{i}", num_prompt=num_prompt, max_tokens=1, tenant=tenant)


def served(server: SimulatedServer, tenant: Tenant) -> int:
    return server.driver.count(CoordinatorMetric.TENANT_TOKENS, tenant.name)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(weights=weights, num_slots=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_tenants_that_flood_get_tokens_by_weight_to_within_a_request_per_slot(
    weights: tuple[float, ...], num_slots: int, seed: int
) -> None:
    rng = random.Random(seed)
    tenants = [Tenant(f"t{i}", weight=weight) for i, weight in enumerate(weights)]
    server = SimulatedServer(num_slots, lambda _: rng.uniform(0.5, 1.5), **FLOOD)
    flood(server, tenants, rng, num_each=30)
    queue, accounts = server.driver.core.queue, list(server.driver.core.accounts)
    # What was served while a tenant was alone is not part of the competition: the first in had the slots.
    before = [served(server, tenant) for tenant in tenants]
    while all(queue.held_by(account).num_requests for account in accounts):
        server.run(server.driver.now + 0.5)
        shares = [
            (served(server, tenant) - first) / tenant.weight
            for tenant, first in zip(tenants, before, strict=True)
        ]
        slack = (num_slots + 1) * (LONGEST_PROMPT + 1) / min(weights)
        assert max(shares) - min(shares) <= slack
    assert not server.driver.refusals


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), num_before=st.integers(1, 30))
def test_the_first_request_of_an_idle_tenant_goes_next_and_idleness_earns_nothing(
    seed: int, num_before: int
) -> None:
    rng = random.Random(seed)
    busy, idle = Tenant("busy"), Tenant("idle")
    server = SimulatedServer(1, lambda _: 1.0, **FLOOD)
    flood(server, [busy], rng, num_each=45)
    server.run(server.driver.now + num_before)
    for i in range(20):
        server.arrive(f"idle-{i}", num_prompt=LONGEST_PROMPT, max_tokens=1, tenant=idle)
    dispatched = len(server.dispatched)
    server.run(server.driver.now + 1.001)
    # Level with the least served that wait, it is next, or after one that was there before.
    assert "idle-0" in server.dispatched[dispatched : dispatched + 2]
    served_before = served(server, busy)
    server.run(server.driver.now + 15)
    difference = served(server, idle) - (served(server, busy) - served_before)
    assert abs(difference) <= 2 * (LONGEST_PROMPT + 1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_predicted_order_is_the_order_in_which_they_go(data: st.DataObject) -> None:
    tenants = [Tenant("a"), Tenant("b", weight=2.0)]
    server = SimulatedServer(1, lambda _: 1.0, **FLOOD)
    server.driver.now = 1.0
    server.arrive("runs", max_tokens=1, tenant=Tenant("other"))
    arrivals = data.draw(
        st.lists(
            st.tuples(st.sampled_from(tenants), st.integers(1, LONGEST_PROMPT), st.integers(-2, 2)),
            min_size=1,
            max_size=20,
        )
    )
    for i, (tenant, num_prompt, priority) in enumerate(arrivals):
        server.arrive(f"r{i}", num_prompt=num_prompt, max_tokens=1, tenant=tenant, priority=priority)
    queue = server.driver.core.queue
    accounts = {account.tenant.name: account for account in server.driver.core.accounts}
    for account in accounts.values():
        account.expected_output = 1.0  # as all answers here
    tenant, _, priority = arrivals[-1]
    account = accounts[tenant.name]
    predicted = [request.request_id for request in queue.in_order()]
    behind = queue.ahead_of(account, priority).num_requests
    server.arrive("last", num_prompt=1, max_tokens=1, tenant=tenant, priority=priority)
    with_last = [request.request_id for request in queue.in_order()]
    assert with_last.index("last") == behind
    assert [r for r in with_last if r != "last"] == predicted
    del server.dispatched[:]
    server.run(server.driver.now + len(arrivals) + 5)
    assert server.dispatched == with_last
