"""A whole server whose workers an operator's command would start."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from support.gateway import MODEL, tiny_tokenizer
from support.join_token import TEST_TOKEN

from twinpool.config import CoordinatorConfig, GatewayConfig, Role
from twinpool.coordinator.launch import WorkerSpec
from twinpool.coordinator.site import _Site
from twinpool.deploy.command import CommandScaler, ScaleCommand
from twinpool.engine.model_files import ResolvedModel
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ConfigError

SPECS = [WorkerSpec(f"{role}-0", role, (), 1, ("--block-size=8",)) for role in (Role.PREFILL, Role.DECODE)]


async def test_a_command_that_fails_at_the_start_ends_the_server_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told where workers connect, and how they would be started; this server starts none."""
    monkeypatch.setattr(Tokenizer, "from_dir", lambda _: tiny_tokenizer())
    path = tmp_path / "scale"
    path.write_text(
        '#!/bin/sh\necho "$TWINPOOL_ROLE $TWINPOOL_COUNT $TWINPOOL_CONNECT $TWINPOOL_WORKER_ARGUMENTS" > '
        f'{tmp_path}/told-$TWINPOOL_ROLE\necho "the cluster is full" >&2\nexit 4\n'
    )
    path.chmod(0o700)
    make = partial(CommandScaler, ScaleCommand.parse(str(path), None))
    config = CoordinatorConfig(port=0, join_token=TEST_TOKEN)
    site = _Site(config, GatewayConfig(), None, ResolvedModel(Path("nowhere"), MODEL), SPECS, make, None)
    async with asyncio.timeout(20):
        with pytest.raises(ConfigError, match="ended with status 4: the cluster is full") as ended:
            await site.run()
    assert "\n" not in str(ended.value)
    role, count, connect, model_dir, deployment, block_size = (tmp_path / "told-prefill").read_text().split()
    assert (role, count, block_size) == ("prefill", "1", "--block-size=8")
    assert connect.startswith("tcp://127.0.0.1:")
    assert model_dir == "--model-dir=nowhere"
    assert deployment.startswith("--deployment=")
