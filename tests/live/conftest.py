"""What tests of KV transports share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.transport_desk import Desk, require

from twinpool.kv_transfer import transports


@pytest.fixture(params=["shm", "tcp", "tcp sealed", "ucx", "loopback"])
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    require(request.param.partition(" ")[0])
    desk = Desk(request.param)
    desk.receiver = await transports.receiver(
        desk.name, desk.region, desk.end, desk.shared, seal=desk.is_sealed
    )
    yield desk
    await desk.close()
