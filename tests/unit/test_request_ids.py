"""Ids that clients choose: their own where possible, never two requests under one, never another tenant's business."""

from __future__ import annotations

import pytest

from twinpool.coordinator.gateway.connection import UnboundedConnection
from twinpool.coordinator.gateway.request_ids import RequestIds, internal_id
from twinpool.coordinator.tenants import ANYONE, Tenant
from twinpool.errors import DuplicateRequest

ACME, ZETA = Tenant("acme"), Tenant("zeta")


def test_a_running_id_is_refused_and_free_again_at_the_end() -> None:
    ids = RequestIds()
    first = ids.claim(ACME, "r")
    with pytest.raises(DuplicateRequest, match="'r' is running"):
        ids.claim(ACME, "r")
    ids.release(first)
    again = ids.claim(ACME, "r")
    assert again.shown_id.startswith("r-")
    with pytest.raises(DuplicateRequest):
        ids.claim(ACME, "r")
    ids.release(again)


def test_a_client_that_has_left_and_tries_again_is_no_duplicate() -> None:
    ids, connection = RequestIds(), UnboundedConnection()
    first = ids.claim(ACME, "r", connection)
    connection.is_gone = True
    second = ids.claim(ACME, "r")
    assert second.request_id != first.request_id
    ids.release(first)
    with pytest.raises(DuplicateRequest):
        ids.claim(ACME, "r")


def test_a_duplicate_that_is_asked_for_gets_an_id_of_its_own() -> None:
    ids = RequestIds()
    claims = [ids.claim(ANYONE, "r", is_duplicate_fine=True) for _ in range(3)]
    assert len({claim.request_id for claim in claims}) == 3
    ids.release(claims[0])
    with pytest.raises(DuplicateRequest):
        ids.claim(ANYONE, "r")


def test_tenants_choose_ids_without_each_other() -> None:
    ids = RequestIds()
    mine, theirs = ids.claim(ACME, "r"), ids.claim(ZETA, "r")
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
    ids.release(ids.claim(ACME, "a-b"))
    second = ids.claim(ACME, "a-b")
    assert second.shown_id != "a-b"
    assert ids.running(ACME, "a-b") is second
    assert ids.running(ACME, second.shown_id) is second
    assert ids.running(ACME, "a") is None
    third = ids.claim(ACME, "a-b", is_duplicate_fine=True)
    assert ids.running(ACME, "a-b") is third
    assert ids.running(ACME, second.shown_id) is second


@pytest.mark.parametrize("wanted", [None, "", "-r", "a b", "é", "x" * 129, "r\n"])
def test_an_id_that_is_none_is_replaced(wanted: str | None) -> None:
    ids = RequestIds()
    first, second = ids.claim(ACME, wanted), ids.claim(ACME, wanted)
    assert first.shown_id != second.shown_id
    assert len(first.shown_id) == 32


def test_an_id_that_runs_for_long_is_never_given_twice() -> None:
    ids = RequestIds(remembered=1)
    first = ids.claim(ANYONE, "r")
    ids.release(ids.claim(ANYONE, "other"))
    second = ids.claim(ANYONE, "r", is_duplicate_fine=True)
    assert second.request_id != first.request_id


def test_only_recent_ids_are_remembered() -> None:
    ids = RequestIds(remembered=2)

    def run(name: str) -> str:
        claim = ids.claim(ANYONE, name)
        ids.release(claim)
        return claim.shown_id

    assert [run(name) for name in ("a", "b", "c", "a")] == ["a", "b", "c", "a"]
    assert run("c") != "c"
