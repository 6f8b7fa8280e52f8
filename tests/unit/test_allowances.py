"""What is left of a tenant's quotas, read without touching them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.coordinator.accounts import Account, Accounts, Bucket
from twinpool.coordinator.tenants import Allowance, Allowances, Tenant

LIMITED = Tenant("acme", requests_per_minute=60, tokens_per_minute=600)


def test_what_a_request_takes_is_missing_and_comes_back_with_time() -> None:
    account = Account(LIMITED, now=10.0)
    account.admit(100, now=10.0)
    assert account.allowances(10.0) == Allowances(Allowance(60, 59.0, 1.0), Allowance(600, 500.0, 10.0))
    assert account.allowances(15.0) == Allowances(Allowance(60, 60.0, 0.0), Allowance(600, 550.0, 5.0))
    account.give_back(40, now=15.0)
    assert account.allowances(15.0).tokens == Allowance(600, 590.0, 1.0)


def test_only_quotas_that_there_are_are_told() -> None:
    assert Account(Tenant("open")).allowances(0.0) == Allowances(None, None)
    told = Account(Tenant("acme", tokens_per_minute=5)).allowances(0.0)
    assert told == Allowances(None, Allowance(5, 5.0, 0.0))


def test_a_tenant_that_has_not_asked_yet_has_all_and_is_not_counted_for_it() -> None:
    accounts = Accounts()
    assert accounts.allowances(LIMITED, 3.0).requests == Allowance(60, 60.0, 0.0)
    assert list(accounts) == []
    accounts.of(LIMITED, 3.0).admit(600, 3.0)
    assert accounts.allowances(LIMITED, 3.0).tokens == Allowance(600, 0.0, 60.0)


def test_a_refusal_says_what_is_left_and_what_was_asked_for() -> None:
    account = Account(LIMITED, now=0.0)
    for _ in range(58):
        account.admit(10, now=0.0)
    refusal = account.refusal(5, now=0.0, num_requests=3)
    assert refusal is not None
    assert (
        refusal.message
        == "of 60 requests per minute 2 are left, and this asks for 3; there is enough in 1.0 s"
    )
    refusal = account.refusal(50, now=0.0)
    assert refusal is not None
    assert (
        refusal.message
        == "of 600 tokens per minute 20 are left, and this takes up to 50; there is enough in 3.0 s"
    )
    account.give_back(30, now=0.0)
    assert account.refusal(50, now=0.0) is None


def test_no_refusal_says_that_there_is_less_than_nothing() -> None:
    account = Account(LIMITED, now=0.0)
    account.admit(900, now=0.0)
    refusal = account.refusal(1, now=0.0)
    assert refusal is not None
    assert "600 tokens per minute 0 are left" in refusal.message


@given(
    steps=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 50), st.booleans()), max_size=20),
    per_minute=st.integers(1, 100),
)
def test_looking_changes_nothing(steps: list[tuple[float, float, bool]], per_minute: int) -> None:
    looked_at, left_alone = Bucket(per_minute, 0.0), Bucket(per_minute, 0.0)
    now = 0.0
    for elapsed_s, amount, looks in steps:
        now += elapsed_s
        if looks:
            told = looked_at.allowance(now)
            assert told.left <= told.per_minute == per_minute
            assert told.full_in_s == pytest.approx((per_minute - told.left) * 60 / per_minute)
        for bucket in (looked_at, left_alone):
            bucket.take(amount, now)
    assert looked_at.allowance(now) == left_alone.allowance(now)
