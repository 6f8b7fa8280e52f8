"""Serves an ASGI application on a port, inside a process that owns its signals and its event loop itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from twinpool.config import require
from twinpool.errors import ConfigError

BACKLOG = 2048
IDLE_CONNECTION_S = 75
"""An idle connection is kept that long: longer than common proxies and client pools keep theirs."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with an event for when it takes connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class HttpServer:
    """A running HTTP server. `port` is the bound one, also when 0 was asked for."""

    def __init__(self, server: _Server, task: asyncio.Task[None], port: int) -> None:
        self._server = server
        self._task = task
        self.port = port

    async def stop(self, deadline_s: float) -> None:
        """Takes no new connections, lets requests finish for at most `deadline_s`, then breaks them off.

        When it returns, no handler runs any more. Calling it twice is fine.
        """
        self._server.config.timeout_graceful_shutdown = deadline_s  # type: ignore[assignment]  # a float works
        self._server.should_exit = True
        await self._task
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)


async def serve_http(app: ASGIApp, host: str, port: int) -> HttpServer:
    """Serves `app` on the running event loop until `HttpServer.stop`. A `port` of 0 takes any free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_S,
        backlog=BACKLOG,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    up = asyncio.create_task(server.is_up.wait())
    try:
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        up.cancel()
    if task.done():
        task.result()
    return HttpServer(server, task, listener.getsockname()[1])


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
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"--port is {port}, which cannot be listened on at {host} ({exc}); "
            "stop what uses it or choose another (0 takes any free one)"
        ) from exc
    return listener
