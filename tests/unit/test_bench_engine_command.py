"""`twinpool bench engine`, run as its user runs it, on a tiny model; and what it says to wrong flags."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.served_model import save_served_model

from twinpool.bench.engine import GROUPS, ceilings, cold_start
from twinpool.bench.engine import report as engine_report
from twinpool.bench.engine.machine import machine_class
from twinpool.bench.limits import EngineFigures, LimitsUnknown
from twinpool.cli import main
from twinpool.commands import bench_engine as command
from twinpool.commands.bench import with_part


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _small_limits_and_the_same_cores_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ceilings, "_MOST_READ_BYTES", 4 << 20)
    monkeypatch.setattr(ceilings, "_CPU_PRODUCTS", ((64, 64, 64),))
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


def bench(model: Path, *arguments: str) -> int:
    return main(["bench", "engine", str(model), "--quick", "--dtype", "float32", *arguments])


def test_a_quick_run_measures_every_part_beside_its_floor_and_writes_all_of_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "roofline.png"
    assert bench(model, "--json", str(report), "--plot", str(plot)) == 0
    values = json.loads(report.read_text())
    assert values["is_complete"]
    assert {row["group"] for row in values["measurements"]} == {
        "kv write" if name == "kv" else name for name in GROUPS
    }
    for row in values["measurements"]:
        assert len(row["seconds"]) >= 1
        assert all(seconds > 0 for seconds in row["seconds"])
        assert len(row["floor_s"]) in (0, len(row["seconds"]))
    assert plot.stat().st_size > 10_000
    said = capsys.readouterr()
    assert "decode: batch 1, context 512" in said.out
    assert "ceiling, 1 thread, float32" in said.out
    assert said.err.startswith("measuring ")
    assert "about 1 minute" in said.err
    assert "decode: batch 1, context 512: " in said.err
    assert "times its floor" in said.err
    figures = EngineFigures.read(report.read_text())
    assert figures.shape.vocab == 320
    assert figures.ratios["decode: batch 1, context 512"] > 0
    assert figures.together(1).flops_per_s > 0


def test_a_run_within_its_baseline_passes_and_one_beyond_fails_by_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_report, "NOISY_SPREAD", math.inf)
    file = tmp_path / "baseline.json"
    only = ("--only", "sampling")
    assert bench(model, *only, "--renew", str(file), "--passes", "2") == 0
    values = json.loads(file.read_text())
    (machine,) = values
    assert values[machine].keys() == {
        f"sampling: {how}, batch 32" for how in ("greedy", "temperature", "top-k and top-p")
    }
    for entry in values[machine].values():
        entry["tolerance"] = 1e6
    file.write_text(json.dumps(values))
    assert bench(model, *only, "--check", str(file)) == 0
    values[machine]["sampling: greedy, batch 32"] = {"ratio": 1e-6, "tolerance": 0.1}
    file.write_text(json.dumps(values))
    capsys.readouterr()
    assert bench(model, *only, "--check", str(file)) == 1
    said = capsys.readouterr().out
    assert "WORSE  sampling: greedy, batch 32" in said
    assert "1 of 3 operations are worse" in said


def test_a_machine_without_a_baseline_is_told_so_and_is_no_success(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    assert bench(model, "--only", "ceilings", "--check", str(file)) == 3
    assert f"NOT CHECKED: there is no file {file}" in capsys.readouterr().err
    for known in ("another machine", machine_class(torch.device("cpu"))):
        file.write_text(json.dumps({known: {}}))
        assert bench(model, "--only", "ceilings", "--check", str(file)) == 3
        said = capsys.readouterr()
        assert "NOT CHECKED" in said.err
        assert said.out == ""
        assert "measuring" not in said.err


def test_a_broken_baseline_is_told_before_anything_is_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    file.write_text("{")
    for judge in ("--check", "--renew"):
        assert bench(model, "--only", "sampling", judge, str(file)) == 2
        said = capsys.readouterr().err
        assert "is no baseline that can be read" in said
        assert len(said.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, a disk that is always full")
def test_a_full_disk_costs_the_report_and_not_what_is_printed(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, "--only", "ceilings", "--json", "/dev/full") == 2
    said = capsys.readouterr()
    assert "ceiling, 1 thread, float32" in said.out
    assert "--json is '/dev/full', which cannot be written: No space left on device" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "speed"], "--only is 'speed'; allowed: names among prefill, decode"),
        (["--threads", "0"], "--threads is 0"),
        (["--cores", "4000"], "--cores is '4000'; allowed: cores among"),
        (["--cores", "a"], "--cores is 'a'"),
        (["--json", "/missing/report.json"], "--json is '/missing/report.json'; allowed: a file in a folder"),
        (["--json", "/"], "--json is '/'; allowed: a file in a folder"),
        (
            ["--plot", "roofline.txt"],
            "--plot is 'roofline.txt'; allowed: a name that ends in .png, .svg, .pdf",
        ),
        (["--passes", "0"], "--passes is 0"),
        (["--dtype", "int3"], "--dtype is 'int3'"),
    ],
)
def test_a_wrong_flag_gives_one_clear_line(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], words: str
) -> None:
    assert bench(model, *arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_ctrl_c_prints_and_writes_what_was_found_until_then(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(command, "_published", lambda _: signal.raise_signal(signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # event loops may have left another
    try:
        assert bench(model, "--only", "sampling,attention,linear", "--json", str(report)) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "interrupted: these are the results so far" in capsys.readouterr().out
    values = json.loads(report.read_text())
    assert not values["is_complete"]
    assert [row["group"] for row in values["measurements"]] == ["attention"]


def test_a_part_that_fails_costs_only_itself(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(cold_start, "_LIMIT_S", 0.01)
    assert bench(model, "--only", "sampling,start", "--json", str(report)) == 4
    assert "FAILED, start: a cold start did not end within" in capsys.readouterr().out
    values = json.loads(report.read_text())
    assert values["failed"].keys() == {"start"}
    assert {row["group"] for row in values["measurements"]} == {"sampling"}


def test_an_unknown_part_is_refused_with_the_parts_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "motor"])
    said = capsys.readouterr().err
    assert "'motor'" in said
    assert "serve" in said
    assert "engine" in said


def test_flags_without_a_part_are_those_of_serve() -> None:
    assert with_part(["bench"]) == ["bench", "serve"]
    assert with_part(["bench", "--num-prompts", "3"]) == ["bench", "serve", "--num-prompts", "3"]
    for whole in (
        ["bench", "--help"],
        ["bench", "engine", "--quick"],
        ["bench", "serve"],
        ["serve", "-h"],
        [],
    ):
        assert with_part(whole) == whole


def test_a_report_of_something_else_is_told() -> None:
    with pytest.raises(LimitsUnknown, match="not a report"):
        EngineFigures.read('{"title": "canary"}')
