"""A server whose timers fail does not go on without them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.gateway import MODEL, tiny_tokenizer
from support.join_token import TEST_TOKEN

from twinpool.config import CoordinatorConfig, GatewayConfig
from twinpool.coordinator.site import _Site
from twinpool.deploy.host import HostScaler
from twinpool.engine.model_files import ResolvedModel
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import TwinpoolError

SECRET = "swordfish"


@pytest.mark.parametrize(
    ("timer", "promise"),
    [
        ("twinpool.coordinator.server.Coordinator._tick", "no lease or deadline would end"),
        ("twinpool.coordinator.gateway.http_server._check", "no client that takes nothing would be cut"),
    ],
)
async def test_a_timer_that_fails_ends_the_server_with_one_line(
    timer: str, promise: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise OverflowError(SECRET)

    monkeypatch.setattr(timer, fail)
    monkeypatch.setattr(Tokenizer, "from_dir", lambda _: tiny_tokenizer())
    config = CoordinatorConfig(port=0, join_token=TEST_TOKEN)
    site = _Site(config, GatewayConfig(), None, ResolvedModel(Path("nowhere"), MODEL), [], HostScaler, None)
    async with asyncio.timeout(20):
        with pytest.raises(TwinpoolError, match=promise) as ended:
            await site.run()
    assert "\n" not in str(ended.value)
    assert SECRET not in str(ended.value)
    assert "OverflowError" in caplog.text
