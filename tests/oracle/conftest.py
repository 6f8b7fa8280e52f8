"""The reference is loaded once, and judges each answer once; each layout is started once. For all oracle tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.default_model import default_model_dir
from support.layouts import HYBRID, LAYOUTS
from support.reference import Reference
from support.server import Server, serving

from twinpool.config import TransportName
from twinpool.kv_transfer import transports

BESIDE_OTHERS = ("--max-wait", "300", "--threads", "1", "--no-pin")
"""Other tests have a core too: whoever waits is not refused for it, a worker goes where there is room, and none keeps a
core busy waiting for a thread that has none."""


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return default_model_dir()


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the layout that the test is `over`."""
    name: str = request.param
    if "ucx" in name and (missing := transports.available()[TransportName.UCX]):
        pytest.skip(f"ucx: {missing}; installing the extra `ucx` (make setup does on Linux) makes this run")
    with serving(
        tmp_path_factory.mktemp(name), "--dtype", "float32", *BESIDE_OTHERS, *(LAYOUTS | HYBRID)[name]
    ) as server:
        yield server
        server.wait_until_empty()
