"""The programs that measure whole servers, on a tiny model: what they count and report, never how fast it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.served_model import SHAPE, save_served_model
from support.server import Server, serving

from twinpool.bench import costs, isolation, makespan
from twinpool.bench.engine.floors import Ceilings, Shape
from twinpool.bench.engine.report import EngineReport
from twinpool.bench.isolation import Gap, times_at_equal_contexts
from twinpool.bench.program import EXIT_BROKEN, EXIT_HELD, EXIT_WRONG
from twinpool.bench.server_under_test import BUSY

pytestmark = pytest.mark.timeout(150)
TINY = Shape(
    hidden=SHAPE["hidden_size"], heads=SHAPE["num_attention_heads"], kv_heads=SHAPE["num_key_value_heads"],
    head_dim=SHAPE["head_dim"], inner=SHAPE["intermediate_size"], vocab=SHAPE["vocab_size"],
    windows=(None,) * SHAPE["num_hidden_layers"], element_bytes=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_served_model(tmp_path_factory.mktemp("model"))
    arguments = ("--dtype", "float32", "--num-blocks", "600")
    with serving(tmp_path_factory.mktemp("log"), str(model), *arguments) as server:
        yield server
        server.wait_until_empty()


@pytest.fixture
def limits(tmp_path: Path) -> str:
    """A report of the engine's ceilings on two cores."""
    ceilings = {"2 threads, float32": Ceilings(1e10, 1e11)}
    file = tmp_path / "engine.json"
    settings = {"shape": TINY, "dtype": "float32", "what": "tiny", "usable_cores": [0, 1]}
    file.write_text(EngineReport({}, settings, ceilings).to_json())
    return str(file)


def figures(status: int, report: Path) -> dict[str, Any]:
    assert status in (EXIT_HELD, EXIT_BROKEN)
    values = json.loads(report.read_text())
    assert values["holds"] == (status == EXIT_HELD)
    found: dict[str, Any] = values["figures"]
    return found


def test_isolation_compares_equal_streams_with_and_without_prompts(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "isolation.json"
    sizes = ("--streams", "2", "--tokens", "400", "--prompt", "300", "--every", "0.05")
    found = figures(isolation.main(["--url", server.url, "--json", str(report), *sizes]), report)
    assert found["p99 ITL, times p50 without prompts"] > 0
    assert min(found["the same two, at equal contexts"]) > 0
    assert len(found["TTFT of prompts beside streams (s)"]) >= 1
    assert found["seconds between prompts"] >= 0.05
    assert found[BUSY].keys() == {"coordinator", "prefill-0", "decode-0"}


def test_gaps_are_compared_with_undisturbed_ones_at_the_same_place_of_the_answer() -> None:
    quiet = [Gap(160, 0.010), Gap(161, 0.012), Gap(175, 0.030), Gap(400, 0.024)]
    busy = [Gap(170, 0.018), Gap(401, 0.024), Gap(900, 0.5)]
    assert times_at_equal_contexts(busy, quiet) == [pytest.approx(1.5), pytest.approx(1.0)]


def test_streams_that_end_before_a_prompt_comes_are_no_result(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--streams", "1", "--tokens", "170", "--prompt", "20", "--every", "60")
    assert isolation.main(["--url", server.url, *sizes]) == EXIT_WRONG
    assert "before a prompt came; ask for more --tokens" in capsys.readouterr().err


def test_makespan_is_told_in_times_of_the_floor_of_all_cores(
    server: Server, limits: str, tmp_path: Path
) -> None:
    report = tmp_path / "makespan.json"
    sizes = ("--requests", "4", "--prompt", "32", "--output", "8", "--rounds", "2", "--limits", limits)
    found = figures(makespan.main(["--url", server.url, "--json", str(report), *sizes]), report)
    assert len(found["makespan (s)"]) == 2
    assert found["times the floor"] == pytest.approx(sum(found["makespan (s)"]) / 2 / found["floor (s)"])
    assert found["floor (s)"] == pytest.approx(max(found["FLOPs"] / 1e11, found["bytes"] / 1e10))


def test_costs_are_counted_per_token_and_per_worker(server: Server, limits: str, tmp_path: Path) -> None:
    report = tmp_path / "costs.json"
    sizes = ("--streams", "4", "--tokens", "400", "--limits", limits)
    found = figures(costs.main(["--url", server.url, "--json", str(report), *sizes]), report)
    assert found["ready (s)"] is None, "it was not started here"
    assert found["tokens counted"] > 0
    assert min(found["a send alone (µs)"], found["a send beside the streams (µs)"]) > 0
    assert 10 < found["bytes per token"] < 1000
    assert found["memory beyond weights and KV pool (MB)"].keys() == {"prefill-0", "decode-0"}
    assert found["most of it (MB)"] > 1


def test_limits_that_are_not_there_are_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert makespan.main(["--url", server.url, "--limits", "/missing.json"]) == EXIT_WRONG
    assert "--limits /missing.json cannot be read" in capsys.readouterr().err
