"""guidellm, a load generator, against a real server: all of its requests are complete, in the sizes it asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clients import command, run
from support.default_model import default_model_dir
from support.server import Server

pytestmark = pytest.mark.timeout(300)
NUM_REQUESTS = 6


def test_every_request_of_guidellm_is_complete(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run(
        [
            command("guidellm", "guidellm"), "benchmark", "run", "--target", server.url,
            "--profile", "concurrent", "--rate", "2", "--max-requests", str(NUM_REQUESTS),
            "--data", "prompt_tokens=64,output_tokens=16", "--processor", str(default_model_dir()),
            "--output-path", str(report), "--disable-console-interactive",
        ],
        tmp_path,
        240,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
    assert {request["output_tokens"] for request in requests["successful"]} == {16}
