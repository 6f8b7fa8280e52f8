"""The table of all targets: what is read of each program's report, and what the exit status says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from twinpool.bench import targets
from twinpool.bench.program import EXIT_BROKEN, EXIT_HELD, EXIT_INTERRUPTED, EXIT_WRONG
from twinpool.bench.server_under_test import BUSY
from twinpool.bench.targets import ProgramFailed

ISOLATION = {
    "seconds between prompts": 2.0,
    "p99 ITL, times p50 without prompts": 1.2,
    "TTFT, times prefill alone": 1.1,
    BUSY: {"coordinator": 0.05, "prefill-0": 0.7, "decode-0": 0.9},
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The programs that were run; each writes a report with the figures of isolation."""
    commands: list[Sequence[str]] = []

    def run(arguments: Sequence[str], _good: Sequence[int]) -> None:
        commands.append(arguments)
        write(Path(arguments[arguments.index("--json") + 1]), ISOLATION)

    monkeypatch.setattr(targets, "_run", run)
    return commands


def write(report: Path, figures: Mapping[str, Any]) -> None:
    report.write_text(json.dumps({"figures": figures}))


def test_the_table_says_what_is_reached_and_which_processes_bind(
    ran: list[Sequence[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "targets.json"
    assert targets.main(["--only", "isolation", "--json", str(file)]) == EXIT_HELD
    assert [arguments[1] for arguments in ran] == ["twinpool.bench.isolation"]
    itl, ttft = json.loads(file.read_text())
    assert (itl["reached"], itl["most"], itl["is_reached"]) == (1.2, 1.25, True)
    assert (ttft["reached"], ttft["most"], ttft["is_reached"]) == (1.1, 1.15, True)
    assert itl["binds"] == "decode-0 90% of a core, prefill-0 70% of a core"
    said = capsys.readouterr().out
    assert "1.20 ×" in said
    assert "≤ 1.25 ×" in said


@pytest.mark.usefixtures("ran")
def test_a_target_that_is_missed_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ISOLATION, "TTFT, times prefill alone", 1.16)
    assert targets.main(["--only", "isolation"]) == EXIT_BROKEN
    assert "NOT YET" in capsys.readouterr().out


def test_a_program_that_fails_is_told_and_what_was_found_before_is_printed(
    ran: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_folder: Path) -> list[targets.Target]:
        raise ProgramFailed("costs ended with status 2")

    monkeypatch.setitem(targets.PROGRAMS, "costs", fail)
    assert targets.main(["--only", "isolation,costs"]) == EXIT_WRONG
    said = capsys.readouterr()
    assert "costs: costs ended with status 2" in said.err
    assert "prefill alone" in said.out
    assert len(ran) == 1


def test_ctrl_c_prints_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ran: list[Sequence[str]]
) -> None:
    def interrupt(_folder: Path) -> list[targets.Target]:
        raise KeyboardInterrupt

    monkeypatch.setitem(targets.PROGRAMS, "makespan", interrupt)
    assert targets.main(["--only", "isolation,makespan"]) == EXIT_INTERRUPTED
    assert "prefill alone" in capsys.readouterr().out
    assert len(ran) == 1


def test_an_unknown_program_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        targets.main(["--only", "speed"])
    assert "--only has speed; allowed: engine, isolation" in capsys.readouterr().err
