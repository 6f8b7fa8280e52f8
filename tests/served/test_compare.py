"""`twinpool compare` as its user runs it: real servers of a tiny model, a report, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.served_model import save_served_model
from support.server import server_environment, wait_for

from twinpool.bench.reports.model import decode_report
from twinpool.bench.serving.record import Ending

STOP_LIMIT_S = 60.0
"""A worker that is told to stop while it loads or compiles does that first."""

Start = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a comparison of the tiny model, whose result goes to `tmp_path`."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        model = save_served_model(tmp_path)
        command = [
            sys.executable, "-m", "twinpool", "compare", str(model), "--output", str(tmp_path / "found"),
            "--kv-tokens", "16384", "--repetitions", "1", *arguments,
        ]  # fmt: skip
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=server_environment()
        )

    return start


def servers_of(program: subprocess.Popen[str]) -> list[psutil.Process]:
    """The servers that the program has started."""
    return [child for child in psutil.Process(program.pid).children() if "serve" in _command(child)]


def test_two_layouts_are_compared_on_the_same_requests_with_equal_answers(
    start: Start, tmp_path: Path
) -> None:
    arms = ("colocated-chunked-64", "1P1D")
    flags = (
        "--request-rate",
        "20",
        "--num-prompts",
        "20",
        "--prompt-as",
        "ids",
        "--random-input-len",
        "48",
        "--random-output-len",
        "8",
    )
    program = start("--arms", "colocated-chunked-64,1p1d", "--workload", "dataset", "--trace", *flags)
    said, _ = program.communicate(timeout=200)
    assert program.returncode in (0, 1), said
    assert "all 20 answers" in said
    assert "one repetition on all arms takes about" in said
    assert "only one repetition was made" in said
    assert f"written: {tmp_path / 'found' / 'random.html'}" in said
    report = decode_report((tmp_path / "found" / "random.json").read_bytes())
    # A busy machine may be too slow to send on time; then the report says so, and the status.
    assert program.returncode == any(arm.not_a_result for arm in report.arms)
    assert tuple(arm.name for arm in report.arms) == arms
    assert {figure.measure.name for figure in report.arms[0].figures} >= {"p99 ITL", "p50 TTFT", "goodput"}
    for arm in report.arms:
        (run,) = arm.runs
        assert [record.ending for record in run.requests] == [Ending.COMPLETED] * 20
        assert all(record.timeline is not None for record in run.requests)
        assert run.settings["noise"].keys() >= {"others_share", "stolen_share", "pace"}
    assert [check.num_different for check in report.output_checks] == [0]
    assert report.commands
    page = (tmp_path / "found" / "random.html").read_text()
    assert "all 20 answers" in page
    assert (tmp_path / "found" / "random.trace.json").stat().st_size > 0
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p))]


@pytest.mark.parametrize(("number", "phase"), [(signal.SIGINT, "starting"), (signal.SIGTERM, "undisturbed")])
def test_ctrl_c_stops_the_servers_while_they_start_and_while_they_are_loaded(
    start: Start, number: signal.Signals, phase: str
) -> None:
    program = start("--arms", "1p1d,colocated-whole", "--workload", "chat")
    assert program.stdout is not None
    while not program.stdout.readline().startswith(phase):
        assert program.poll() is None
    wait_for("a server was started", lambda: bool(servers_of(program)))
    servers = servers_of(program)
    program.send_signal(number)
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 130, said
    assert "nothing was compared yet; there is no report" in said
    wait_for("the servers are gone", lambda: not any(server.is_running() for server in servers), STOP_LIMIT_S)


def test_an_arm_that_does_not_run_is_told_before_anything_is_measured(start: Start) -> None:
    program = start("--arms", "1p1d,other=http://127.0.0.1:9", "--workload", "chat")
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 2, said
    assert "no server answers at http://127.0.0.1:9" in said
    assert "undisturbed" not in said


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
