"""`twinpool plan` as it is called: what it prints and writes, and what it refuses in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.made_profiles import made_profile
from support.planned import Pretended, bottleneck

from twinpool.bench.serving.datasets.shapes import Shape
from twinpool.bench.serving.slo import Slo
from twinpool.cli import main
from twinpool.planner.deployment import Deployment
from twinpool.planner.plan.experiments import Seen
from twinpool.planner.plan.simulated import simulated
from twinpool.planner.profile.saved import save_profile

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
    assert "TP16 in a layout, --tp 16 of `twinpool plan`" in large
    beside = refused(
        capsys,
        "--model",
        "llama-3.1-405b",
        "--gpu",
        "h100",
        *with_trace,
        *SLOS,
        "--tp",
        "1",
        "--kv-memory",
        "80GiB",
    )
    assert "--kv-memory is 80.0 GiB, which with 756.0 GiB of weights on each does not fit on 1" in beside
    few = refused(capsys, "--model", "llama-3.1-70b", "--gpu", "h100", *with_trace, *SLOS, "--budget", "1")
    assert "they fit on 2" in few
    assert "--tp is '0'" in refused(capsys, *H100, *with_trace, *SLOS, "--tp", "0")
    assert "--trace is 'requests.txt'; allowed: a .jsonl" in refused(
        capsys, *H100, "--trace", "requests.txt", *SLOS
    )


def test_a_page_does_not_replace_what_is_read(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    records = Path(trace).with_suffix(".json")
    Path(trace).rename(records)
    page = str(records.with_suffix(".html"))
    told = refused(capsys, *H100, *SLOS, "--trace", str(records), "--report", page)
    assert f"the report's JSON is '{records}'; allowed: a file that --trace does not name" in told


def test_a_trace_without_answers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "bare.csv"
    trace.write_text("timestamp,input_tokens\n0,100\n1,100\n")
    assert "no column for the output tokens" in refused(capsys, *H100, "--trace", str(trace), *SLOS)
    trace.write_text("timestamp,input_tokens,output_tokens\n0,100,1\n1,100,1\n")
    assert "has no outputs" in refused(capsys, *H100, "--trace", str(trace), *SLOS)


def test_what_an_operator_mistypes_is_refused_before_anything_is_simulated(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*H100, *SLOS, "--trace", trace)
    for flags, told in (
        (("--token-budget", "0"), "--token-budget is 0"),
        (("--max-num-seqs", "0"), "--max-num-seqs is 0"),
        (
            ("--report", str(tmp_path / "no" / "plan.html")),
            "a file that can be written, in a folder that exists",
        ),
        (("--report", str(tmp_path)), "a name that ends in .html"),
        (("--budget", "0"), "--budget is 0; allowed: 1 or more"),
        (("--price", "-1"), "--price is -1.0; allowed: 0 or more"),
        (("--tp", "3"), "a divisor of llama-3.1-8b's 32 query heads"),
        (("--gpu", "h1000"), "--gpu is 'h1000'; allowed: h100"),
        (("--model", "llama-9"), "--model is 'llama-9'; allowed"),
        (("--slo", "latency=2s"), "--slo is 'latency=2s'; allowed: ttft=TIME"),
        (("--trace", "missing.jsonl"), "--trace is 'missing.jsonl'; allowed: a file that is here"),
    ):
        assert told in refused(capsys, *given, *flags)


def test_traces_of_one_request_of_none_and_of_prompts_beyond_the_context_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "few.jsonl"
    line = json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 100})
    for text, told in (
        ("", "is empty"),
        (line, "few.jsonl has 1 request; a plan needs 2 at least"),
        (f"{line}\n{line.replace('1000', '200000')}", "say --too-long clip, scale or drop"),
    ):
        path.write_text(text)
        assert told in refused(capsys, *H100, "--trace", str(path), *SLOS)


def test_a_budget_of_one_and_a_price_of_nothing_are_planned_for(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.planner.plan.simulated.simulated", Pretended(bottleneck(20.0, 15.0, 12.0)))
    asked = ("plan", *H100, "--trace", trace, *SLOS, "--budget", "1", "--price", "0", "--effort", "10000")
    assert main(asked) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "No split was tried: it takes 2 accelerators at least (--budget 2)." in told
    assert "At $0 an hour for each accelerator" in told


def test_a_profile_is_planned_with_hybrids_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of its layouts run in the real simulator once each; then rates are pretended."""
    path = tmp_path / "profile.json"
    save_profile(replace(made_profile(), model="smollm2-135m"), path)
    pretended, served = Pretended(bottleneck(3.0, 2.0, 1.0)), dict[str, float]()

    def simulate(deployment: Deployment, shapes: Sequence[Shape]) -> Seen:
        if deployment.name not in served:
            served[deployment.name] = simulated(deployment, shapes[:40]).share_good(Slo(ttft_s=1000.0))
        return pretended(deployment, shapes)

    monkeypatch.setattr("twinpool.planner.plan.simulated.simulated", simulate)
    asked = (
        "plan", "--profile", str(path), "--kv-memory", "256MiB", "--dataset-name", "random", "--random-input-len",
        "60", "--random-output-len", "4", "--budget", "2", "--slo", "ttft=3s", "--effort", "10000", "--hybrid",
        "--colocated-budgets", "128",
    )  # fmt: skip
    assert main(asked) == 0
    told = capsys.readouterr()
    assert {"1P1D", "2 colocated"} <= served.keys()
    assert set(served.values()) == {1.0}
    assert "hybrids" in told.out
    assert "! warning:" in told.out
