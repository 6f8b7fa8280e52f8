"""guidellm, a load generator, against a real server: all of its requests are complete, in the sizes it asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clients import command, needs, run
from support.default_model import default_model_dir
from support.server import Server

pytestmark = [needs("guidellm"), pytest.mark.timeout(300)]
NUM_REQUESTS = 6
NUM_TOKENS = 16


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_of_guidellm_is_complete(server: Server, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    run(
        [
            command("guidellm", "guidellm"), "run",
            "--backend", f"kind=openai_http,target={server.url},request_format={route}",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={default_model_dir()}",
            "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}",
            "--output", f"kind=json,path={report}", "--disable-console",
        ],
        tmp_path,
        200,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
    assert not requests["incomplete"]
    assert {request["output_tokens"] for request in requests["successful"]} == {NUM_TOKENS}
    assert all(request["time_to_first_token_ms"] > 0 for request in requests["successful"])
