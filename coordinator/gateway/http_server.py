"""Serves an ASGI application on a port, inside a process that owns its signals and its event loop itself."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from twinpool.config import GatewayConfig, require
from twinpool.coordinator.gateway.http_protocol import GatewayProtocol
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.vital import OnFailure, start_vital
from twinpool.errors import ConfigError

BACKLOG = 2048
IDLE_CONNECTION_S = 75
"""How long an idle connection is kept: longer than common proxies and client pools keep theirs."""
SEND_BUFFER_BYTES = 64 << 10
"""What the kernel holds for one client. Left alone it grows to megabytes, and hides for long that a client stalls."""
MOST_CONNECTIONS = 4096
"""Without `--max-connections`: as many as this process may open files for, up to here."""
FILES_BESIDE_CONNECTIONS = 256
DATE_S = 1.0
"""How often the date in the answers' heads is brought up to date."""
CHECKS_PER_STALL = 20
"""How often in `client_stall_s` it is looked at what clients have taken."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, with an event for when it takes connections, and told when to end:
    it does not look ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._exit_asked = asyncio.Event()

    def ask_to_exit(self) -> None:
        """Ends `serve`."""
        self.should_exit = True
        self._exit_asked.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit_asked.wait(), DATE_S)


class HttpServer:
    """A running HTTP server. `port` is the bound one, also when 0 was asked for."""

    def __init__(
        self, server: _Server, task: asyncio.Task[None], checking: asyncio.Task[None], port: int
    ) -> None:
        self._server = server
        self._task = task
        self._checking = checking
        self.port = port

    async def stop(self, deadline_s: float) -> None:
        """Takes no new connections, lets requests finish for at most `deadline_s`, then breaks them off.

        When it returns, no handler runs any more. Calling it twice is fine.
        """
        self._server.config.timeout_graceful_shutdown = deadline_s  # type: ignore[assignment]  # a float works
        self._server.ask_to_exit()
        await self._task
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)
        self._checking.cancel()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # closing already, but its client does not take the rest


async def serve_http(
    app: ASGIApp, host: str, port: int, limits: GatewayConfig, meter: GatewayMeter, on_failure: OnFailure
) -> HttpServer:
    """Serves `app` on the running event loop until `HttpServer.stop`. A `port` of 0 takes any free one.

    `on_failure` is called if nobody watches the clients any more: the server must end then.

    Raises:
        ConfigError: the address cannot be listened on, or this process may not open that many connections.
    """
    limits = _with_files(limits)
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=partial(GatewayProtocol, limits, meter),  # type: ignore[arg-type]  # it is only called
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_S,
        backlog=BACKLOG,
    )
    server = _Server(config)
    connections: set[GatewayProtocol] = server.server_state.connections  # type: ignore[assignment]
    meter.watch(connections)
    task = asyncio.create_task(server.serve([listener]))
    up = asyncio.create_task(server.is_up.wait())
    try:
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        up.cancel()
    if task.done():
        task.result()
    checking = start_vital(
        _check(connections, limits.client_stall_s / CHECKS_PER_STALL),
        "no client that takes nothing would be cut any more",
        on_failure,
    )
    return HttpServer(server, task, checking, listener.getsockname()[1])


async def _check(connections: set[GatewayProtocol], every_s: float) -> None:
    """Cuts clients that take nothing. Never returns."""
    now = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(every_s)
        for connection in list(connections):
            connection.check(now())


def _with_files(limits: GatewayConfig) -> GatewayConfig:
    """The limits with a number of connections, and this process allowed to open as many."""
    number = limits.max_connections or MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = number + FILES_BESIDE_CONNECTIONS
    if resource.RLIM_INFINITY != hard < files:
        most = hard - FILES_BESIDE_CONNECTIONS
        require("--max-connections", number, limits.max_connections is None and most > 0,
                f"at most {most}: this process may open {hard} files (see ulimit -n)")  # fmt: skip
        number, files = most, hard
    if resource.RLIM_INFINITY != soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return replace(limits, max_connections=number)


def _listen(host: str, port: int) -> socket.socket:
    require("--port", port, 0 <= port <= 65535, "0 to 65535 (0 takes any free one)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(
            f"--host is {host!r}, which is no address of this machine ({exc.strerror})"
        ) from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # The system notices a client whose machine is gone.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"--port is {port}, which cannot be listened on at {host} ({exc}); "
            "stop what uses it or choose another (0 takes any free one)"
        ) from exc
    return listener
