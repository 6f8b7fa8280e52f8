"""`twinpool simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from support.made_profiles import made_profile
from support.simulated import LAYOUT, LinearTimes

from twinpool.bench.serving.record import Ending, decode_run
from twinpool.cli import main
from twinpool.config import Role, SchedulerConfig
from twinpool.errors import ConfigError
from twinpool.planner.deployment import Deployment, Pool
from twinpool.planner.profile.saved import save_profile
from twinpool.planner.simulator.layout import Part, parse_layout

H100 = ("simulate", "--model", "llama-3.1-8b", "--gpu", "h100", "--disable-tqdm")
SMALL = (
    "--num-prompts",
    "30",
    "--request-rate",
    "20",
    "--random-input-len",
    "200",
    "--random-output-len",
    "20",
)


def test_it_prints_the_benchs_summary_the_same_for_the_same_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = []
    for _ in range(2):
        assert main([*H100, *SMALL, "--layout", "2P3D", "--save-result", "--seed", "3"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert "Successful requests:                           30" in told[0]
    assert "3 decode of llama-3.1-8b in bf16 on 1 × H100 SXM, roofline: computing" in told[0]
    assert "simulated: 2P3D; no server was loaded" in told[0]
    assert "load generator" not in told[0]
    result = json.loads((tmp_path / "simulation-2P3D-20.0qps-llama-3.1-8b.json").read_text())
    assert result["completed"] == 30
    assert result["twinpool"]["is_simulated"] is True
    assert result["twinpool"]["accelerators"] == {"prefill": 2, "decode": 3}
    assert result["mean_ttft_ms"] > 0


def test_another_seed_is_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    told = set()
    for seed in ("1", "2"):
        assert main([*H100, *SMALL, "--seed", seed]) == 0
        told.add(capsys.readouterr().out)
    assert len(told) == 2


def test_records_and_a_report_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    records, page = tmp_path / "records.json", tmp_path / "page.html"
    flags = (
        "--layout",
        "2xcolocated",
        "--save-records",
        str(records),
        "--report",
        str(page),
        "--goodput",
        "ttft:100",
    )
    assert main([*H100, *SMALL, *flags]) == 0
    assert "Request goodput (req/s; TTFT 100 ms)" in capsys.readouterr().out
    run = decode_run(records.read_bytes())
    assert {record.ending for record in run.requests} == {Ending.COMPLETED}
    assert all(len(record.chunks) == 20 for record in run.requests)
    assert "2 colocated, simulated" in page.read_text()


def test_objectives_may_be_said_as_a_plan_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for flags in (("--slo", "ttft=0.1s", "--slo", "itl=50ms"), ("--goodput", "ttft:100", "itl:50")):
        assert main([*H100, *SMALL, *flags]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def test_progress_is_a_line_on_a_terminal_that_makes_room_for_the_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.commands.progress.SHOWN_EVERY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*(flag for flag in H100 if flag != "--disable-tqdm"), *SMALL]) == 0
    told = capsys.readouterr().err
    assert "\r29 of 30 requests, " in told
    assert "\r\033[Ksimulated 30 requests in " in told


def test_a_closed_loop_and_a_trace_of_the_azure_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*H100, "--dataset-name", "azure-code", "--num-prompts", "20", "--num-clients", "4"]) == 0
    assert "Peak concurrent requests:                      4.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--layout", "0P1D"), "--layout is '0P1D'; allowed: 1 to 10,000 workers of a role"),
        (("--layout", "99999P1D"), "--layout is '99999P1D'; allowed: 1 to 10,000 workers"),
        (("--layout", "1P1D(TP3)"), "TP is 3; allowed: a divisor of llama-3.1-8b's 32 query heads"),
        (("--layout", "2P"), "--layout is '2P'"),
        (("--layout", "2xcolocated", "--hybrid"), "allowed: two pools with --hybrid, like 2P3D"),
        (("--times", "roofline:h100"), "given is --times, --gpu; give exactly one"),
        (("--kv-memory", "1MiB"), "--kv-memory is 1048576; allowed:"),
        (("--max-model-len", "1000000"), "--max-model-len is 1000000; allowed: at most 131072"),
        (("--report", "page.txt"), "--report is 'page.txt'; allowed: a name that ends in .html"),
        (("--num-clients", "0"), "--num-clients is 0"),
        (("--kv-memory", "10000TiB"), "--kv-memory is 10995116277760000; allowed: at most 16,777,216 blocks"),
        (("--link", "0"), "--link is 0.0; allowed: 0.001 GB/s or more"),
        (("--num-prompts", "0"), "--num-prompts is 0; allowed: 1 or more"),
        (("--num-prompts", "-3"), "--num-prompts is -3; allowed: 1 or more"),
        (("--seed", "-1"), "--seed is -1; allowed: 0 or more"),
        (("--request-rate", "1e-300"), "the time of the last request is "),
        (("--goodput", "x:1"), "--goodput is 'x:1'"),
        (
            ("--slo", "ttft=1s", "--goodput", "ttft:1"),
            "--slo is ['ttft=1s']; allowed: nothing with --goodput",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*H100, "--num-prompts", "5", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "llama-3.1-8b"), "given is none of them; give exactly one"),
        (("--gpu", "h100"), "--model is not given"),
        (("--model", "llama-3.1-8b", "--times", "magic"), "--times is 'magic'; allowed: roofline:GPU"),
        (("--model", "llama-3.1-70b", "--gpu", "h100"), "they fit on 4: TP4 in a layout, --tp 4"),
        (("--model", "llama-3.1-8b", "--gpu", "h900"), "h900"),
        (("--model", "no/such-model", "--gpu", "h100"), "no/such-model"),
        (("--profile", "no-such.json"), "no-such.json"),
    ],
)
def test_hardware_that_is_not_known_is_refused(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--num-prompts", "5", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1P1D", (Part(Role.PREFILL, 1), Part(Role.DECODE, 1))),
        ("2p(tp2)4d(TP4)", (Part(Role.PREFILL, 2, 2), Part(Role.DECODE, 4, 4))),
        ("64P192D", (Part(Role.PREFILL, 64), Part(Role.DECODE, 192))),
        ("4xcolocated", (Part(Role.COLOCATED, 4),)),
        ("4 colocated", (Part(Role.COLOCATED, 4),)),
        ("4xcolocated(TP2)", (Part(Role.COLOCATED, 4, 2),)),
    ],
)
def test_layouts_are_read_as_people_write_them(text: str, parts: tuple[Part, ...]) -> None:
    assert parse_layout(text) == parts


@pytest.mark.parametrize(
    "parts",
    [
        (Part(Role.PREFILL, 2), Part(Role.DECODE, 4)),
        (Part(Role.PREFILL, 2, 2), Part(Role.DECODE, 4, 4)),
        (Part(Role.COLOCATED, 4),),
        (Part(Role.COLOCATED, 4, 2),),
    ],
)
def test_a_deployments_name_is_read_as_its_layout(parts: tuple[Part, ...]) -> None:
    """So results of different layouts have names, and files, of their own."""
    pools = tuple(
        Pool(part.role, part.num_workers, LinearTimes(), 64, SchedulerConfig(), part.tp) for part in parts
    )
    assert parse_layout(Deployment(pools, LAYOUT, 1024).name) == parts


@pytest.mark.parametrize("text", ["", "P1D", "1P0D", "1D1P", "xcolocated", "1P1D0", "colocated"])
def test_other_layouts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--layout is"):
        parse_layout(text)


def test_workers_of_a_profile_share_its_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What one computes slows the others down: four do not do four times as much as one."""
    file = tmp_path / "profile.json"
    save_profile(msgspec.structs.replace(made_profile(), model="llama-3.1-8b"), file)
    flags = ("--profile", str(file), "--kv-memory", "8GiB", "--max-model-len", "1024", "--disable-tqdm")
    load = (
        "--num-prompts",
        "40",
        "--num-clients",
        "40",
        "--random-input-len",
        "100",
        "--random-output-len",
        "20",
    )
    rates = []
    for layout in ("1xcolocated", "4xcolocated"):
        where = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", f"{layout}.json")
        assert main(["simulate", *flags, *load, *where, "--layout", layout]) == 0
        rates.append(json.loads((tmp_path / f"{layout}.json").read_text())["request_throughput"])
        assert "profiled 2026-01-02" in capsys.readouterr().out
    assert rates[0] < rates[1] < 3 * rates[0]


def test_a_profile_is_doubted_aloud(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    elsewhere = {"cpu": "a processor of another machine"}
    made = msgspec.structs.replace(
        made_profile(), model="llama-3.1-8b", machine=elsewhere, warnings=("prompts: the fit is far off",)
    )
    save_profile(made, file)
    flags = ("--kv-memory", "8GiB", "--max-model-len", "1024", "--disable-tqdm")
    page = tmp_path / "page.html"
    assert (
        main(["simulate", "--profile", str(file), *flags, *SMALL, "--report", str(page), "--label", "x"]) == 0
    )
    told = capsys.readouterr().out
    assert "prompts: the fit is far off" in page.read_text()
    assert "x, simulated" in page.read_text()
    assert "WARNING: prompts: the fit is far off" in told
    assert "WARNING: the profile was measured on a processor of another machine" in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--save-result", "--result-filename", "a.json", "--report", "a.html"),
            "--result-filename is 'a.json'; allowed: a file that the report's JSON does not name",
        ),
        (
            ("--save-records", "a.json", "--report", "a.html"),
            "the report's JSON is 'a.json'; allowed: a file that --save-records does not name",
        ),
        (
            ("--dataset-name", "jsonl-trace", "--dataset-path", "trace.json", "--report", "trace.html"),
            "the report's JSON is 'trace.json'; allowed: a file that --dataset-path does not name",
        ),
        (
            ("--report", "nowhere/a.html"),
            "--report is 'nowhere/a.html'; allowed: a file in a folder that exists",
        ),
    ],
)
def test_no_file_is_written_over_another(
    flags: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Above all not over what is read: a trace, or a profile that took minutes."""
    monkeypatch.chdir(tmp_path)
    assert main([*H100, "--num-prompts", "5", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_profile_says_nothing_of_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    save_profile(msgspec.structs.replace(made_profile(), model="llama-3.1-8b"), file)
    assert main(["simulate", "--profile", str(file), "--num-prompts", "5", "--num-clients", "1"]) == 2
    assert "say --kv-memory SIZE for each worker" in capsys.readouterr().err
