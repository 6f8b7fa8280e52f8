"""`twinpool report`: what it reads, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.image import imread
from support.made_up_runs import made_up_report, made_up_run

from twinpool.bench.reports.model import encode_report
from twinpool.bench.reports.plots import write_plots
from twinpool.bench.serving.record import NO_CONNECTION, Ending, Sender, encode_run
from twinpool.cli import main
from twinpool.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved_run(path: Path, seed: int = 1, is_split: bool = True) -> str:
    path.write_bytes(encode_run(made_up_run(seed=seed, num_requests=12, is_split=is_split)))
    return path.name


def test_saved_runs_become_arms_and_those_of_one_name_repetitions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (saved_run(folder / f"{n}.json", seed=n) for n in range(3))
    status = main(
        [
            "report",
            f"split={first}",
            f"split={second}",
            third,
            "--goodput",
            "ttft:300",
            "tpot:50",
            "-o",
            "out.html",
        ]
    )
    assert status == 0
    report = json.loads((folder / "out.json").read_bytes())
    assert [(arm["name"], len(arm["runs"])) for arm in report["arms"]] == [("split", 2), ("2", 1)]
    assert (report["title"], report["slo"]) == ("split, 2", "ttft:300, tpot:50")
    assert {fact["name"]: fact["value"] for fact in report["settings"]} == {
        "num_prompts": "12",
        "request_rate": "4.0",
    }
    assert "goodput" in [figure["measure"]["name"] for figure in report["arms"][0]["figures"]]
    assert "out.html, out.json" in capsys.readouterr().out


def test_a_saved_report_becomes_the_same_page_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = made_up_report(12, 1)
    (folder / "saved.json").write_bytes(encode_report(report))
    assert main(["report", "saved.json", "-o", "again.html", "--trace", "t.json", "--plots", "svg"]) == 0
    assert (folder / "again.json").read_bytes() == (folder / "saved.json").read_bytes()
    out = capsys.readouterr().out
    assert "p99 ITL: 1p1d 42 % lower than colocated-chunked-128 [38, 45]" in out
    trace = json.loads((folder / "t.json").read_bytes())
    assert "requests (1p1d)" in [
        event["args"].get("name") for event in trace["traceEvents"] if event["ph"] == "M"
    ]
    assert sorted(path.name for path in folder.glob("again-*.svg")) == [
        f"again-{name}.svg" for name in ("goodput", "itl", "map", "ttft")
    ]


def test_a_run_whose_generator_was_the_bottleneck_is_called_no_result(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(num_requests=12)
    busy = Sender(num_requests=12, cpu_share=0.99, send_lags_s=(0.5,) * 12)
    (folder / "late.json").write_bytes(encode_run(msgspec.structs.replace(run, senders=(busy,))))
    assert main(["report", "late.json"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("not a result: late: half of the requests were sent more than 500.00 ms late")


def test_the_warm_up_that_a_run_was_made_with_does_not_count(folder: Path) -> None:
    run = made_up_run(num_requests=12)
    warm_up_s = sorted(record.intended_at_s for record in run.requests)[5]
    for name, seconds in (("a", 0.0), ("b", warm_up_s)):
        changed = msgspec.structs.replace(run, settings=run.settings | {"warm_up": seconds})
        (folder / f"{name}.json").write_bytes(encode_run(changed))
    assert main(["report", "a.json", "b.json", "-o", "out.html"]) == 0
    arms = json.loads((folder / "out.json").read_bytes())["arms"]
    assert [arm["windows"][0]["from_s"] for arm in arms] == [0.0, warm_up_s]
    assert arms[0]["not_a_result"] == arms[1]["not_a_result"] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no JSON"),
        (b"[1]", "holds a list"),
        (b'{"request_throughput": 1.0, "completed": 3}', "has no requests, only what they come to"),
        (b'{"requests": 7}', "no such file of this version"),
        (b'{"arms": [], "title": "t", "created_at": "", "format": 99}', "format 99"),
    ],
)
def test_what_holds_no_requests_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    (folder / "r.json").write_bytes(content)
    assert main(["report", "r.json", "-o", "out.html"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "r.json" in said


def test_a_page_of_a_runs_name_leaves_the_run_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_run(folder / "report.json")
    before = (folder / "report.json").read_bytes()
    assert main(["report", "report.json"]) == 0
    assert "written: report.html, report.report.json" in capsys.readouterr().out
    assert main(["report", "report.report.json"]) == 0, (
        "what was written is a report, and the name is still taken"
    )
    assert (folder / "report.json").read_bytes() == before


def test_files_that_are_missing_or_go_not_together_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_run(folder / "report.json")
    assert main(["report", "none.json"]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
    assert main(["report", "report.json", "-o", "page.htm"]) == 2
    assert main(["report", "report.json", "-o", "missing/page.html"]) == 2
    (folder / "other.json").write_bytes(encode_report(made_up_report(3, 1)))
    assert main(["report", "report.json", "other.json", "-o", "out.html"]) == 2
    assert "one report alone" in capsys.readouterr().err


def num_tinted(pixels: np.ndarray, color: np.ndarray) -> int:
    """How many of the pixels [n, 3] are mixed from white and at least 10 % of the colour, as the map's cells are."""
    away = (1 - color) / np.linalg.norm(1 - color)
    depth = (1 - pixels) @ away
    beside = np.linalg.norm(1 - pixels - depth[:, None] * away, axis=1)
    return int(((depth > 0.1 * np.linalg.norm(1 - color)) & (beside < 0.03)).sum())


def test_every_chart_is_drawn_as_a_file_and_none_is_blank(folder: Path) -> None:
    written = write_plots(folder / "r", ".png", made_up_report(12, 1))
    assert [path.name for path in written] == ["r-ttft.png", "r-itl.png", "r-goodput.png", "r-map.png"]
    for path in written:
        pixels = imread(path)[..., :3].reshape(-1, 3)
        for color in ((0xC4, 0x56, 0x1B), (0x1D, 0x6F, 0xB8)):
            assert num_tinted(pixels, np.array(color) / 255) > 50, f"{path.name} has nothing in {color}"
    with pytest.raises(ConfigError, match="cannot be written"):
        write_plots(folder / "missing" / "r", ".png", made_up_report(12, 1))


def test_a_report_without_values_has_no_plots(folder: Path) -> None:
    report = msgspec.structs.replace(made_up_report(1, 1), arms=(), curves=(), maps=())
    assert write_plots(folder / "r", ".png", report) == []


def test_a_run_of_which_much_failed_leads_with_that(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_up_run(num_requests=12)
    lost = {"ending": Ending.FAILED, "status": 0, "chunks": (), "error": f"{NO_CONNECTION}: refused"}
    requests = [
        msgspec.structs.replace(each, **lost) if number >= 5 else each
        for number, each in enumerate(run.requests)
    ]
    (folder / "a.json").write_bytes(encode_run(msgspec.structs.replace(run, requests=tuple(requests))))
    assert main(["report", "a.json", "-o", "out.html"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    num_lost = 12 - sum(each.ending is Ending.COMPLETED for each in requests)
    assert first.startswith(f"warning: a: {num_lost} of 12 requests (")
    assert second.startswith("warning: a: the server went away: none of the last 7 requests, due from ")
