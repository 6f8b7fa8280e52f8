"""`twinpool plan` as it is called: what it prints and writes, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.planned import Pretended, bottleneck

from twinpool.cli import main

H100 = ("--model", "llama-3.1-8b", "--gpu", "h100")
SLOS = ("--slo", "ttft=2s", "--slo", "itl=50ms")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = (
        json.dumps({"timestamp": 100 * n, "input_length": 1000, "output_length": 100 + n % 7})
        for n in range(200)
    )
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


def test_a_plan_is_told_written_as_a_page_and_printed_as_json(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = Pretended(bottleneck(20.0, 15.0, 5.0))
    monkeypatch.setattr("twinpool.planner.plan.simulated.simulated", pretended)
    page = tmp_path / "plan.html"
    asked = (
        "plan",
        *H100,
        "--trace",
        trace,
        *SLOS,
        "--budget",
        "4",
        "--price",
        "4",
        "--effort",
        "10000",
        "--tp",
        "1",
    )
    assert main([*asked, "--report", str(page)]) == 0
    told = capsys.readouterr().out
    assert "requests.jsonl: 10.0 requests/s, 1,000 tokens in" in told
    assert "· 1P1D serves 1" in told
    assert "headroom with 2 accelerators" in " ".join(told.split())
    assert "57.0 GiB" in told
    assert "Prefill and decode workers" in page.read_text()
    assert main([*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recommended"] == "1P1D"
    assert plan["headroom"]["estimate"] == pytest.approx(0.5, abs=0.02)
    assert plan["costs"][0]["per_request"] == pytest.approx(2 * 4 / 3600 / 10)


def test_ctrl_c_tells_what_is_known(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = Pretended(bottleneck(20.0, 15.0, 5.0), stops_after=20)
    monkeypatch.setattr("twinpool.planner.plan.simulated.simulated", pretended)
    assert main(["plan", *H100, "--trace", trace, *SLOS, "--effort", "10000"]) == 130
    assert "Interrupted: this is what was known by then." in capsys.readouterr().out


def test_what_cannot_be_is_refused_with_what_to_change(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_trace = ("--trace", trace)
    assert "--slo is not given" in refused(capsys, *H100, *with_trace)
    below = refused(capsys, *H100, *with_trace, "--slo", "itl=1ms")
    assert "--slo itl=1ms is below the floor" in below
    assert "data sheet's roofline" in below
    large = refused(capsys, "--model", "llama-3.1-405b", "--gpu", "h100", *with_trace, *SLOS, "--tp", "4")
    assert "do not fit on 4 devices" in large
    assert "--tp 16, or TP16 in a layout" in large
    few = refused(capsys, "--model", "llama-3.1-70b", "--gpu", "h100", *with_trace, *SLOS, "--budget", "1")
    assert "they fit on 2" in few
    assert "--tp is '0'" in refused(capsys, *H100, *with_trace, *SLOS, "--tp", "0")
    assert "--trace is 'requests.txt'; allowed: a .jsonl" in refused(
        capsys, *H100, "--trace", "requests.txt", *SLOS
    )


def test_a_trace_without_answers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "bare.csv"
    trace.write_text("timestamp,input_tokens\n0,100\n1,100\n")
    assert "no column for the output tokens" in refused(capsys, *H100, "--trace", str(trace), *SLOS)
    trace.write_text("timestamp,input_tokens,output_tokens\n0,100,1\n1,100,1\n")
    assert "has no outputs" in refused(capsys, *H100, "--trace", str(trace), *SLOS)
