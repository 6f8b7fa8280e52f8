"""One server for all clients: the built-in model on two pools, in float32, so an answer is the same each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clients import MODEL
from support.server import Server, serving
from support.tool_model import tool_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tool_model(tmp_path_factory.mktemp("model"))
    settings = ("--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "2048")
    with serving(tmp_path_factory.mktemp("server"), str(model), *settings) as server:
        yield server
        server.wait_until_empty()
