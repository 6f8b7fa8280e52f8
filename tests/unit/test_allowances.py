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
