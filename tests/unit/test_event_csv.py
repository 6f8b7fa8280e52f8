"""`twinpool metrics`: what it prints of a request's events, and which events it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.bench.serving.event_csv import Event, parse_events, stages_of
from twinpool.cli import main

WHOLE = """\
# a request of both sides' clocks
event,time_ms,tokens
intended,90
sent,100
received,103
queued,104

prefill_start,130
transfer_start,200
prefill_end,280
first_token,290
token,315
transfer_end,316
token,340,3
end,350
declared_ttft_ms,190
declared_tpot_ms,12.5
declared_output_tokens,5
"""


def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> str:
    """What is said of a file that is refused."""
    file = tmp_path / "events.csv"
    file.write_text(text)
    assert main(["metrics", str(file)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"twinpool: {file}: ")
    return told.err.removeprefix(f"twinpool: {file}: ").rstrip()


def test_all_metrics_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "events.csv"
    file.write_text(WHOLE)
    assert main(["metrics", str(file)]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "ended completed",
        "output 5 tokens in 3 chunks",
        "TTFT 190.000 ms from sent",
        "200.000 ms from intended",
        "187.000 ms from received",
        "3.000 ms sent → received",
        "1.000 ms received → queued",
        "26.000 ms queued → prefill_start",
        "70.000 ms prefill_start → transfer_start",
        "80.000 ms transfer_start → prefill_end",
        "10.000 ms prefill_end → first_token",
        "ITL 12.500 ms mean of 4 gaps",
        "0.000 ms p50",
        "25.000 ms p99",
        "25.000 ms max",
        "TPOT 12.500 ms",
        "E2E 240.000 ms",
        "50.000 ms from first output to last",
        "decode rate 80.00 tokens/s",
        "whole-request rate 20.83 tokens/s",
    ]


def test_json_has_seconds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "events.csv"
    file.write_text("event,time_s\nreceived,5\ntoken,5.5\ntoken,5.75\ntimed_out,9\n")
    assert main(["metrics", "--json", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ending"], found["ttft_s"], found["itls_s"], found["e2e_s"]) == (
        "timed_out",
        0.5,
        [0.25],
        0.75,
    )
    assert found["stages_s"] == {"received → token": 0.5}


def test_a_request_without_output_has_no_latencies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "events.csv"
    file.write_text("event,time_s\nsent,0\nrejected,0.1\n")
    assert main(["metrics", str(file)]) == 0
    assert capsys.readouterr().out.split() == [
        "ended",
        "rejected",
        "output",
        "0",
        "tokens",
        "in",
        "0",
        "chunks",
    ]


def test_stages_sum_to_the_ttft() -> None:
    events = parse_events(WHOLE)
    first, sent = events.at_s(Event.FIRST_TOKEN), events.at_s(Event.SENT)
    assert first is not None
    assert sent is not None
    assert sum(stage.duration_s for stage in stages_of(events)) == pytest.approx(first - sent)


REFUSED = {
    "sent,0\nfirst_token,20\ntoken,10\nend,30": "line 4: token is at 0.01 s, before line 3 (first_token) at 0.02 s; "
    "time goes back, order the rows by one clock",
    "token,5\nsent,6\nend,7": "line 2: token comes before the request was sent; put sent or received first",
    "sent,0\ntoken,5": "the last event is token (line 3), so how the request ended is missing; add a row with one of",
    "sent,0\nend,5\ntoken,6": "line 4: token comes after the request had ended (line 3: end)",
    "sent,0\nsent,1\nend,5": "line 3: sent is there already (line 2); it can happen once",
    "received,0\nsent,1\nend,5": "line 3: sent comes after received (line 2), which can only follow it",
    "sent,0\ntoken,1\nfirst_token,2\nend,5": "line 4: first_token comes after token (line 3), which can only follow it",
    "sent,0\ntoken,1\nprefill_start,2\nend,5": "line 4: prefill_start comes after token (line 3), which can",
    "sent,0\nprefill_end,1\nend,5": "line 3: prefill_end comes without prefill_start",
    "sent,0\nprefill_start,1\ntoken,2\nend,5": "line 4: token comes before prefill_end; prefill gives the first token",
    "sent,0\nthought,1\nend,5": "line 3 has the event 'thought'; known are intended, sent, received,",
    "sent,soon\nend,5": "line 2 has 'soon' where a number is to be",
    "sent,nan\nend,5": "line 2 has 'nan' where a number is to be",
    "sent,0,1\nend,5": "line 2 gives 1 tokens to sent; only first_token and token have some",
    "sent,0\ntoken,1,0\nend,5": "line 3 has '0' tokens; allowed is a whole number, 1 to 1,000,000",
    "sent,0\ntoken,1,1000001\nend,5": "line 3 has '1000001' tokens; allowed is a whole number, 1 to 1,000,000",
    "sent,0\ntoken,1,1.5\nend,5": "line 3 has '1.5' tokens; allowed is a whole number, 1 to 1,000,000",
    "sent,0\ntoken,1,1,1\nend,5": "line 3 has 4 cells; it is to have event,time_ms,tokens",
    "sent\nend,5": "line 2 has 1 cells; it is to have event,time_ms,tokens",
    "": "the file has no events; it is to begin with sent or received",
    "sent,0\nend,5\ndeclared_speed,5": "line 4 has declared_speed; known are declared_ttft_s,",
    "sent,0\nend,5\ndeclared_e2e_ms,fast": "line 4 has 'fast' where a number is to be",
    "sent,0\nend,5\ndeclared_e2e_ms,5": "line 4 has declared_e2e_ms 5, and the events give none; correct the one or",
    "sent,0\ntoken,5\nend,5\ndeclared_ttft_ms,6": "line 5 has declared_ttft_ms 6, and the events give 5; correct",
    "sent,0\ntoken,5\nend,5\ndeclared_e2e_ms,3,940": "line 5 has '940' behind '3'; a declared number has no commas",
}


@pytest.mark.parametrize("rows", REFUSED)
def test_inconsistent_events_are_refused_with_their_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: str
) -> None:
    assert refusal(capsys, tmp_path, f"event,time_ms,tokens\n{rows}\n").startswith(REFUSED[rows])


@pytest.mark.parametrize("header", ["time_ms,event", "event,time", "event,time_s,count", "event", "sent,0"])
def test_the_columns_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, header: str) -> None:
    told = refusal(capsys, tmp_path, f"{header}\nsent,0\nend,5\n")
    assert told == (
        f"line 1 is {header!r}; it is to name the columns: event,time_ms or event,time_s, and tokens if any"
    )


def test_an_empty_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refusal(capsys, tmp_path, "\n# nothing\n").startswith("the file has no lines")


THREE = "event,time_ms\nsent,0\ntoken,100\ntoken,110\ntoken,120\nend,120\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [("decode_ms", "30"), ("e2e_s", "0.130"), ("tpot_ms", "6.67"), ("decode_tokens_per_s", "150")],
)
def test_a_gap_too_many_is_told_as_such(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str
) -> None:
    told = refusal(capsys, tmp_path, f"{THREE}declared_{name},{text}\n")
    assert told.endswith(": off by one, 3 tokens have 2 gaps between them")


@pytest.mark.parametrize(
    ("text", "is_held"), [("16.7", True), ("16.67", True), ("17", True), ("16.6", False)]
)
def test_a_declared_number_is_rounded_as_it_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, is_held: bool
) -> None:
    """Three tokens in 180 ms: 16.666… per second."""
    file = tmp_path / "events.csv"
    file.write_text(
        f"event,time_ms\nsent,0\ntoken,60\ntoken,120\ntoken,180\nend,180\ndeclared_request_tokens_per_s,{text}"
    )
    assert (main(["metrics", str(file)]) == 0) is is_held
    capsys.readouterr()


def test_a_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["metrics", str(tmp_path / "none.csv")]) == 2
    assert "none.csv', which cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "picture.csv").write_bytes(b"\xff\xfe\x00\x81")
    assert main(["metrics", str(tmp_path / "picture.csv")]) == 2
    assert "picture.csv', which is not text" in capsys.readouterr().err
