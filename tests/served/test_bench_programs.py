"""The programs that prove promises, run as their user runs them, in seconds."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.server import server_environment, wait_for

Start = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the program, whose temporary files go to `tmp_path`."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "twinpool.bench.canary", *arguments]
        environment = server_environment() | {"TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    return start


def logs(where: Path) -> list[Path]:
    return list(where.glob("twinpool-bench-*.log"))


def test_a_short_canary_run_starts_a_server_reports_and_stops_it_and_leaves_no_log(
    start: Start, tmp_path: Path
) -> None:
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
    assert not logs(tmp_path)


def test_ctrl_c_stops_the_server_that_the_program_started(start: Start) -> None:
    program = start()
    assert program.stdout is not None
    assert program.stdout.readline().startswith("twinpool serve")
    (server,) = psutil.Process(program.pid).children()
    program.send_signal(signal.SIGINT)
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 130, said
    wait_for("the server is gone", lambda: not server.is_running())


def test_a_server_that_cannot_start_is_told_with_its_own_words_and_leaves_its_log(
    start: Start, tmp_path: Path
) -> None:
    program = start("--serve", "--prefill 0")
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 2, said
    assert "--prefill is 0; allowed: 1 or more" in said
    (log,) = logs(tmp_path)
    assert "--prefill is 0" in log.read_text()


def test_a_log_that_was_asked_for_is_written_there_and_stays(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "asked.log"
    program = start("--serve", "--prefill 0", "--log", str(log))
    program.communicate(timeout=60)
    assert "--prefill is 0" in log.read_text()
    assert not logs(tmp_path)


def test_a_log_that_cannot_be_written_is_told(start: Start, tmp_path: Path) -> None:
    program = start("--log", str(tmp_path / "missing" / "serve.log"))
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 2, said
    assert "serve.log cannot be written: No such file" in said


def test_a_url_where_nobody_listens_is_told(start: Start) -> None:
    program = start("--url", "http://127.0.0.1:9")
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 2, said
    assert "no process of yours listens on port 9" in said
