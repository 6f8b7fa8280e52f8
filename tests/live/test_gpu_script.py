"""`bench/gpu.sh` is ready for a machine with a GPU: every line of it that a CPU can run has run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_its_rehearsal_runs_the_tests_and_measures_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bench/gpu.sh", "--dry-run"],
        cwd=ROOT, env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    tests = (tmp_path / "tests.txt").read_text()
    assert "passed" in tests
    assert "failed" not in tests
    report = json.loads((tmp_path / "engine-0.json").read_text())
    groups = {row["group"] for row in report["measurements"]}
    assert groups >= {"prefill", "decode", "decode without graphs", "attention", "kv write", "linear"}
    assert groups >= {"elementwise", "sampling", "block copy", "mirror"}
    assert all(row["ratio"] is None or row["ratio"] > 0 for row in report["measurements"])
    table = (tmp_path / "engine-0.txt").read_text()
    assert "rehearsal: figures mean nothing" in table
    assert "measure again" not in table


def test_it_says_what_it_takes() -> None:
    done = subprocess.run(["bench/gpu.sh", "--dry"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "usage: bench/gpu.sh [--dry-run]\n"
