"""Ids that clients choose: their own where possible, never two requests under one, never another tenant's business."""

from __future__ import annotations

import pytest
from support.gateway import IdleConnection

from twinpool.coordinator.gateway.request_ids import Claim, RequestIds, internal_id
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import DuplicateRequest

ACME, ZETA = Tenant("acme"), Tenant("zeta")


def claim(ids: RequestIds, tenant: Tenant, wanted: str | None, *, is_duplicate_fine: bool = False) -> Claim:
    return ids.claim(tenant, wanted, IdleConnection(), is_duplicate_fine=is_duplicate_fine)


def test_a_running_id_is_refused_and_free_again_at_the_end() -> None:
    ids = RequestIds()
    first = claim(ids, ACME, "r")
    with pytest.raises(DuplicateRequest, match="'r' is running"):
        claim(ids, ACME, "r")
    ids.release(first)
    again = claim(ids, ACME, "r")
    assert again.shown_id.startswith("r-")
    with pytest.raises(DuplicateRequest):
        claim(ids, ACME, "r")
    ids.release(again)


def test_a_client_that_has_left_and_tries_again_is_no_duplicate() -> None:
    ids, connection = RequestIds(), IdleConnection()
    first = ids.claim(ACME, "r", connection)
    connection.is_gone = True
    second = claim(ids, ACME, "r")
    assert second.request_id != first.request_id
    ids.release(first)
    with pytest.raises(DuplicateRequest):
        claim(ids, ACME, "r")


def test_a_duplicate_that_is_asked_for_gets_an_id_of_its_own() -> None:
    ids = RequestIds()
    claims = [claim(ids, ANYONE, "r", is_duplicate_fine=True) for _ in range(3)]
    assert len({claim.request_id for claim in claims}) == 3
    ids.release(claims[0])
    with pytest.raises(DuplicateRequest):
        claim(ids, ANYONE, "r")


def test_tenants_choose_ids_without_each_other() -> None:
    ids = RequestIds()
    mine, theirs = claim(ids, ACME, "r"), claim(ids, ZETA, "r")
    assert mine.shown_id == theirs.shown_id == "r"
    assert mine.request_id != theirs.request_id
    assert ids.running(ACME, "r") is mine
    ids.release(mine)
    assert ids.running(ACME, "r") is None
    assert ids.running(ZETA, "r") is theirs


def test_no_choice_of_ids_makes_two_tenants_meet() -> None:
    assert internal_id(Tenant("a"), "b:c") != internal_id(Tenant("b"), "c")
    assert internal_id(Tenant("a-b"), "c") != internal_id(Tenant("a"), "b-c")


def test_a_running_request_is_found_by_what_it_wanted_and_by_what_it_got() -> None:
    ids = RequestIds()
    ids.release(claim(ids, ACME, "a-b"))
    second = claim(ids, ACME, "a-b")
    assert second.shown_id != "a-b"
    assert ids.running(ACME, "a-b") is second
    assert ids.running(ACME, second.shown_id) is second
    assert ids.running(ACME, "a") is None
    third = claim(ids, ACME, "a-b", is_duplicate_fine=True)
    assert ids.running(ACME, "a-b") is third
    assert ids.running(ACME, second.shown_id) is second


@pytest.mark.parametrize("wanted", [None, "", "-r", "a b", "é", "x" * 129, "r\n"])
def test_an_id_that_is_none_is_replaced(wanted: str | None) -> None:
    ids = RequestIds()
    first, second = claim(ids, ACME, wanted), claim(ids, ACME, wanted)
    assert first.shown_id != second.shown_id
    assert len(first.shown_id) == 32


def test_an_id_that_runs_for_long_is_never_given_twice() -> None:
    ids = RequestIds(remembered=1)
    first = claim(ids, ANYONE, "r")
    ids.release(claim(ids, ANYONE, "other"))
    second = claim(ids, ANYONE, "r", is_duplicate_fine=True)
    assert second.request_id != first.request_id


def test_only_recent_ids_are_remembered() -> None:
    ids = RequestIds(remembered=2)

    def run(name: str) -> str:
        given = claim(ids, ANYONE, name)
        ids.release(given)
        return given.shown_id

    assert [run(name) for name in ("a", "b", "c", "a")] == ["a", "b", "c", "a"]
    assert run("c") != "c"
