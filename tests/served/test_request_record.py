"""`twinpool serve --record`: what is recorded of real traffic, and that the load generator replays it as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.served_model import save_served_model
from support.server import Server, server_environment, serving, wait_for

pytestmark = pytest.mark.timeout(120)
SYSTEM = [3 + number % 200 for number in range(64)]
"""What several prompts begin with: four KV blocks."""
PROMPTS = (
    SYSTEM + [5] * 20,
    SYSTEM + [6] * 40,
    [7] * 10,
    SYSTEM + [5] * 20,
    SYSTEM[:32] + [8] * 25,
)
OUTPUTS = (6, 1, 9, 3, 4)
BENCH_LIMIT_S = 90.0


@dataclass
class Recorded:
    """A server with a record."""

    server: Server
    model: Path
    path: Path

    def lines(self) -> list[dict[str, Any]]:
        """What is recorded so far, in the order of arrival."""
        lines = [msgspec.json.decode(line) for line in self.path.read_bytes().splitlines()]
        return sorted(lines, key=lambda line: int(line["timestamp"]))

    def lines_once_there_are(self, number: int) -> list[dict[str, Any]]:
        wait_for(f"{number} lines", lambda: len(self.lines()) >= number)
        assert len(self.lines()) == number
        return self.lines()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("record")
    path = folder / "requests.jsonl"
    model = save_served_model(tmp_path_factory.mktemp("model"))
    arguments = ("--dtype", "float32", "--num-blocks", "400", "--record", str(path))
    with serving(folder, str(model), *arguments) as server:
        yield Recorded(server, model, path)
        server.wait_until_empty()
        assert server.stop() == 0
    assert all(msgspec.json.decode(line) for line in path.read_bytes().splitlines())


def _ask(server: Server, prompt: list[int], num_output: int, **headers: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60.0, verify=False)


def _in_order_of_appearance(lines: list[dict[str, Any]]) -> list[list[int]]:
    """The hash ids, numbered anew: what prompts share and nothing else."""
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(id_, len(numbers)) for id_ in line["hash_ids"]] for line in lines]


def test_what_was_recorded_is_replayed_with_the_same_lengths_and_the_same_reuse(
    recorded: Recorded, tmp_path: Path
) -> None:
    server = recorded.server
    for prompt, num_output in zip(PROMPTS, OUTPUTS, strict=True):
        assert _ask(server, prompt, num_output).status_code == 200
    refused = _ask(server, PROMPTS[0], 5, **{"x-request-timeout": "1e-6"})
    assert refused.status_code == 400
    *served, last = lines = recorded.lines_once_there_are(len(PROMPTS) + 1)
    assert [line["twinpool"]["block_size"] for line in lines if "twinpool" in line] == [16]
    assert [line["input_length"] for line in served] == [len(prompt) for prompt in PROMPTS]
    assert [line["output_length"] for line in served] == list(OUTPUTS)
    assert {(line["outcome"], line["finish_reason"]) for line in served} == {("completed", "length")}
    assert (last["outcome"], last["output_length"], last["error"]) == ("rejected", 0, "invalid_request_error")
    assert _in_order_of_appearance(served) == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 5, 6],
        [],
        [0, 1, 2, 3, 4],
        [0, 1, 7],
    ]
    assert [line["cached_tokens"] for line in served] == [0, 64, 0, 80, 32]
    for line in served:
        assert line["cached_tokens"] + line["computed_tokens"] == line["input_length"]
        assert line["transferred_tokens"] is not None
        assert 0 < line["ttft_ms"] <= line["e2e_ms"]

    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(recorded.path.read_bytes())
    command = [
        sys.executable, "-m", "twinpool", "bench", "serve", "--base-url", server.url,
        "--tokenizer", str(recorded.model), "--dataset-name", "jsonl-trace", "--dataset-path", str(trace),
        "--prompt-as", "ids", "--max-concurrency", "1", "--disable-tqdm",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env=server_environment(), cwd=tmp_path, check=False,
        timeout=BENCH_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    replayed = recorded.lines_once_there_are(len(lines) + len(PROMPTS))[len(lines) :]
    for field in ("input_length", "output_length", "cached_tokens", "computed_tokens"):
        assert [line[field] for line in replayed] == [line[field] for line in served], field
    assert _in_order_of_appearance(replayed) == _in_order_of_appearance(served)
    assert server.metric("twinpool_requests_recorded_total") == len(lines) + len(PROMPTS)
    assert server.metric("twinpool_requests_not_recorded_total") == 0


def test_every_choice_has_a_line_and_no_line_has_text(recorded: Recorded) -> None:
    before = len(recorded.lines())
    body = {"prompt": "the quick brown swordfish " * 4, "max_tokens": 3, "n": 2, "user": "swordfish"}
    assert recorded.server.post("/v1/completions", body).status_code == 200
    lines = recorded.lines_once_there_are(before + 2)[before:]
    assert [line["choices"] for line in lines] == [2, 2]
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"] != []
    assert "swordfish" not in recorded.path.read_text()
