"""One server for all clients: the built-in model on two pools, in float32, so an answer is the same each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.default_model import default_model_dir
from support.server import Server, serving

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    default_model_dir()
    with serving(
        tmp_path_factory.mktemp("server"), "--dtype", "float32", "--max-model-len", "2048"
    ) as server:
        yield server
        server.wait_until_empty()
