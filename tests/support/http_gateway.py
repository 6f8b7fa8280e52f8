"""A gateway on a real socket of 127.0.0.1, over a scripted coordinator, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import openai

from support.gateway import MODEL, ScriptedService, tiny_tokenizer
from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.http_server import HttpServer, serve_http
from twinpool.coordinator.gateway.key_ring import KeyRing
from twinpool.coordinator.gateway.meter import GatewayMeter
from twinpool.coordinator.gateway.routes import create_app
from twinpool.errors import TwinpoolError

THE = tuple(tiny_tokenizer().encode("the"))
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Gateway:
    """A gateway on a free port of 127.0.0.1, and the scripted coordinator behind it."""

    service: ScriptedService
    server: HttpServer
    meter: GatewayMeter

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        """The value of one of the gateway's own metrics."""
        (line,) = [line for line in self.meter.text().decode().splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


def must_not_fail(error: TwinpoolError) -> None:
    """Fails the test, as an error that nobody handles, if work that a server needs ends."""
    raise AssertionError(error)


async def serve(
    service: ScriptedService, host: str, port: int, keys: KeyRing | None = None, **limits: Any
) -> Gateway:
    config, meter = GatewayConfig(**limits), GatewayMeter()
    app = create_app(service, tiny_tokenizer(), MODEL, limits=config, keys=keys, meter=meter)
    return Gateway(service, await serve_http(app, host, port, config, meter, must_not_fail), meter)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition()` has become true, which nothing announces; fails after 20 s."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # sockets and timers decide, and they set no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Gateway]:
    service = ScriptedService()
    gateway = await serve(service, "127.0.0.1", 0, **{"max_body_bytes": 20_000, **limits})
    try:
        yield gateway
    finally:
        await gateway.server.stop(deadline_s=5.0)
    service.assert_settled()


@contextlib.asynccontextmanager
async def posted(
    gateway: Gateway, body: dict[str, object], headers: str = ""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection on which `body` has been posted to the chat route; closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port, limit=1 << 26)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
    writer.write(head.encode() + data)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_until(reader: asyncio.StreamReader, ending: bytes, limit_s: float = 10.0) -> bytes:
    return await asyncio.wait_for(reader.readuntil(ending), limit_s)
