"""A gateway over a scripted service, spoken to without a socket; for the tests of its routes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from support.gateway import MODEL, ScriptedService, in_process, tiny_tokenizer

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.routes import create_app


@pytest.fixture
async def service() -> AsyncIterator[ScriptedService]:
    """What the gateway asks of; every request must be settled when the test ends."""
    service = ScriptedService()
    yield service
    service.assert_settled()


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that takes bodies of up to 20,000 bytes."""
    app = create_app(service, tiny_tokenizer(), MODEL, limits=GatewayConfig(max_body_bytes=20_000))
    transport = in_process(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
