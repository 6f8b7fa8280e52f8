"""The programs that prove promises, run as their user runs them, in seconds."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.server import server_environment, wait_for

pytestmark = pytest.mark.timeout(150)


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twinpool.bench.canary", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=server_environment()
    )


def test_a_short_canary_run_starts_a_server_reports_and_stops_it(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    program = start("--minutes", "0.01", "--clients", "1", "--sample", "0.5", "--json", str(report_path))
    said, _ = program.communicate(timeout=120)
    assert program.returncode == 0, said
    report = json.loads(report_path.read_text())
    assert report["holds"]
    assert report["figures"]["canary rounds"] >= 1
    assert report["figures"]["USS, start → end, slope once settled"].keys() == {
        "coordinator",
        "prefill-0",
        "decode-0",
    }
    assert said.rstrip().endswith("all promises held")


def test_ctrl_c_stops_the_server_that_the_program_started() -> None:
    program = start()
    assert program.stdout is not None
    assert program.stdout.readline().startswith("twinpool serve")
    (server,) = psutil.Process(program.pid).children()
    program.send_signal(signal.SIGINT)
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 130, said
    wait_for("the server is gone", lambda: not server.is_running())


def test_a_server_that_cannot_start_is_told_with_its_own_words() -> None:
    program = start("--serve", "--prefill 0")
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 2, said
    assert "--prefill is 0; allowed: 1 or more" in said


def test_a_url_where_nobody_listens_is_told() -> None:
    program = start("--url", "http://127.0.0.1:9")
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 2, said
    assert "no process of yours listens on port 9" in said
