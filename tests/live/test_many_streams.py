"""The program that measures what the coordinator adds to a token, on few streams: what it counts, never how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.served_model import save_served_model

from twinpool.bench import many_streams
from twinpool.bench.program import EXIT_BROKEN, EXIT_HELD, EXIT_WRONG


def test_every_token_of_every_stream_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_streams, "TOGETHER_ROUNDS", 3)
    monkeypatch.setattr(many_streams, "TOGETHER_PAUSE_S", 0.1)
    monkeypatch.setattr(many_streams, "SETTLING_S", 0.1)
    model = save_served_model(tmp_path)
    report = tmp_path / "report.json"
    sizes = ("--streams", "12", "--seconds", "1", "--gap", "0.1", "--model", str(model))
    status = many_streams.main([*sizes, "--json", str(report)])
    assert status in (EXIT_HELD, EXIT_BROKEN)
    found = json.loads(report.read_text())
    assert found["checks"][1]["holds"], found["checks"][1]
    sparse = found["figures"]["tokens now and then"]
    assert sparse["tokens"] > 12
    assert 0 < sparse["median (ms)"] <= sparse["p99 (ms)"] <= sparse["most (ms)"]
    assert found["figures"]["all streams' tokens in one message"]["tokens"] == 3 * 12


def test_a_coordinator_that_cannot_start_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert many_streams.main(["--model", str(tmp_path / "none")]) == EXIT_WRONG
    assert "did not start" in capfd.readouterr().err
