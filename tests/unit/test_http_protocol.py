"""When a client counts as stalled: only when it takes nothing at all, however slowly it reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.http_protocol import GRACE_S, GatewayProtocol
from twinpool.coordinator.gateway.meter import GatewayMeter

STALL_S = 30.0


class SlowTransport:
    """Holds what is written until the test takes some of it."""

    def __init__(self) -> None:
        self.buffered = 0
        self.is_aborted = False
        self.socket = socket.socket()

    def get_extra_info(self, name: str) -> Any:
        return self.socket if name == "socket" else None

    def set_write_buffer_limits(self, *, high: int) -> None:
        assert high > 0

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, data: bytes) -> None:
        self.buffered += len(data)

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


async def silent(_scope: Scope, receive: Receive, _send: Send) -> None:
    """An application that answers nothing until its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture
async def transport() -> AsyncIterator[SlowTransport]:
    transport = SlowTransport()
    yield transport
    transport.socket.close()


@pytest.fixture
async def protocol(transport: SlowTransport) -> AsyncIterator[GatewayProtocol]:
    config = uvicorn.Config(silent, log_config=None, lifespan="off")
    config.load()
    protocol = GatewayProtocol(
        GatewayConfig(client_stall_s=STALL_S),
        GatewayMeter(),
        config=config,
        server_state=ServerState(),
        app_state={},
        _loop=asyncio.get_running_loop(),
    )
    protocol.connection_made(transport)  # type: ignore[arg-type]
    protocol.check(0.0)
    yield protocol
    protocol.connection_lost(ConnectionResetError())


async def test_a_client_that_takes_a_byte_now_and_then_is_never_cut(
    protocol: GatewayProtocol, transport: SlowTransport
) -> None:
    now = 0.0
    for _ in range(100):
        protocol.transport.write(b"xx")  # more than it takes: the buffer only grows
        now += STALL_S - 1
        transport.buffered -= 1
        protocol.check(now)
    assert not transport.is_aborted


async def test_a_connection_with_nothing_to_take_is_never_cut(
    protocol: GatewayProtocol, transport: SlowTransport
) -> None:
    protocol.check(10 * STALL_S)
    protocol.transport.write(b"x")
    protocol.check(10 * STALL_S + 1)
    assert not transport.is_aborted


async def test_a_stalled_client_is_given_up_once(protocol: GatewayProtocol, transport: SlowTransport) -> None:
    stalls: list[float] = []
    protocol.transport.write(b"x")
    protocol.on_stall = lambda: stalls.append(now)
    for now in (1.0, STALL_S - 1.0, STALL_S):
        protocol.check(now)
    assert stalls == [STALL_S]
    assert not transport.is_aborted
    protocol.check(STALL_S + 1.0)
    assert stalls == [STALL_S]
    assert transport.is_aborted, "nobody answers on it any more"


async def test_a_client_that_was_given_up_has_a_bounded_grace(
    protocol: GatewayProtocol, transport: SlowTransport
) -> None:
    loop = asyncio.get_running_loop()
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    protocol.transport.write(b"x")
    protocol.give_up()
    protocol.check(loop.time() + GRACE_S / 2)
    assert not transport.is_aborted
    protocol.check(loop.time() + GRACE_S + 1.0)
    assert transport.is_aborted
