"""The servers that the cases share; each is started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.fleet import TRANSPORTS, Fleet, assert_canary, assert_returned, broken_server, split_server
from support.served_model import save_served_model
from support.server import Server
from support.visitors import Visit, Visitor


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("logs"), save_served_model(tmp_path_factory.mktemp("model")))
    yield fleet
    fleet.close()


@pytest.fixture(params=TRANSPORTS)
def split(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Server]:
    """Two prefill workers and one decode worker, over each transport in turn; empty after the test."""
    server = split_server(fleet, request.param)
    yield server
    assert_canary(server)
    assert_returned(server)


@pytest.fixture(params=[*TRANSPORTS, "colocated"])
def anywhere(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Server]:
    """`split`, and a deployment that does both in one worker."""
    name = request.param
    server = fleet.server("--colocated=1") if name == "colocated" else split_server(fleet, name)
    yield server
    assert_canary(server)
    assert_returned(server)


@pytest.fixture
def colocated(fleet: Fleet) -> Iterator[Server]:
    """One worker that does both."""
    server = fleet.server("--colocated=1")
    yield server
    assert_canary(server)
    assert_returned(server)


@pytest.fixture(params=TRANSPORTS)
def broken(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Server]:
    """Two pools over a link that flips bytes and loses pushes, and enough attempts to get through in the end."""
    server = broken_server(fleet, request.param)
    yield server
    assert_canary(server)
    assert_returned(server)


@pytest.fixture
def visit() -> Iterator[Visit]:
    """Makes visitors of a server; those that are still there at the end of the test leave then."""
    with ExitStack() as stack:

        def arrive(server: Server, **fields: Any) -> Visitor:
            visitor = Visitor(server, **fields)
            stack.callback(visitor.leave)
            return visitor

        yield arrive
