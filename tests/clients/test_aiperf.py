"""aiperf, a load generator, against a real server: every request is complete, and its timings make sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clients import MODEL, command, needs, run
from support.default_model import default_model_dir
from support.server import Server

pytestmark = [needs("aiperf"), pytest.mark.timeout(300)]
TOKENIZER = "local/tokenizer"
NUM_REQUESTS = 6
NUM_TOKENS = 16


def keep_tokenizer(folder: Path) -> None:
    """Puts the model's tokenizer where aiperf looks for it without a network: a cache of the hub's in `folder`."""
    repository = folder / "huggingface" / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        (snapshot / name).symlink_to(default_model_dir() / name)


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_every_request_of_aiperf_is_complete(server: Server, tmp_path: Path, endpoint: str) -> None:
    keep_tokenizer(tmp_path)
    run(
        [
            command("aiperf", "aiperf"), "profile", "--model", MODEL, "--url", server.url,
            "--endpoint-type", endpoint, "--streaming", "--concurrency", "2",
            "--request-count", str(NUM_REQUESTS), "--tokenizer", TOKENIZER,
            "--synthetic-input-tokens-mean", "64", "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", str(NUM_TOKENS), "--output-tokens-stddev", "0",
            "--extra-inputs", "ignore_eos:true", "--random-seed", "1", "--ui", "simple",
            "--artifact-dir", str(tmp_path / "artifacts"),
        ],
        tmp_path,
        200,
    )  # fmt: skip
    (file,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert found["output_sequence_length"]["avg"] == pytest.approx(NUM_TOKENS, abs=1)
    assert 0 < found["time_to_first_token"]["avg"] < found["request_latency"]["avg"]
