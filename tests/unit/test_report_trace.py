"""Spans, the timeline's data, and the trace, held against the trace event format."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.made_up_runs import HOSTILE, made_up_report, made_up_run

from twinpool.bench.reports.spans import CLIENT, lanes, spans_of
from twinpool.bench.reports.timeline import timeline_data
from twinpool.bench.reports.trace import trace, write_trace
from twinpool.bench.serving.record import Ending, Run
from twinpool.errors import ConfigError

PHASES = {
    "X": {"dur"},
    "b": {"id", "cat"},
    "e": {"id", "cat"},
    "n": {"id", "cat"},
    "C": {"args"},
    "M": {"args"},
}
"""Fields that an event of each phase needs beside ph, name, pid and tid, and (but for M) ts."""
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
}


def check_format(document: dict[str, Any]) -> None:
    """Raises AssertionError where the document is not in the trace event format, or a viewer could not nest it."""
    assert isinstance(document["traceEvents"], list)
    assert document["displayTimeUnit"] in ("ms", "ns")
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    last_ts = 0
    for event in document["traceEvents"]:
        needed = PHASES[event["ph"]] | {"name", "pid", "tid"} | (set() if event["ph"] == "M" else {"ts"})
        assert needed <= event.keys(), event
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert isinstance(event["args"][field], kind)
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= last_ts >= 0, "in order of time"
        last_ts = event["ts"]
        match event["ph"]:
            case "X":
                assert isinstance(event["dur"], int)
                assert event["dur"] >= 0
                tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "C":
                assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            case "b":
                rows[event["cat"], event["id"]].append(event["name"])
            case "e":
                assert rows[event["cat"], event["id"]].pop() == event["name"], "what began last ends first"
            case "n":
                assert rows[event["cat"], event["id"]], "within its request"
    assert not any(rows.values()), "all that began has ended"
    for slices in tracks.values():
        assert all(later[0] >= earlier[1] for earlier, later in pairwise(slices))


def names(document: dict[str, Any]) -> list[str]:
    return [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("with_timelines", [True, False])
def test_a_trace_is_in_the_trace_event_format(is_split: bool, with_timelines: bool) -> None:
    run = made_up_run(num_requests=80, rate=20, is_split=is_split, with_timelines=with_timelines)
    document = json.loads(json.dumps(trace({"": run})))
    check_format(document)
    events = document["traceEvents"]
    begun = [event for event in events if event["ph"] == "b" and "request_id" in event["args"]]
    assert {event["args"]["request_id"] for event in begun} == {record.request_id for record in run.requests}
    workers = ["decode-0", "prefill-0", "prefill-1"] if is_split else ["colocated-0"]
    assert names(document) == ["requests", "load", *(workers if with_timelines else [])]
    assert sum(event["ph"] == "n" for event in events) == sum(bool(record.chunks) for record in run.requests)


def test_the_load_counter_ends_at_zero_and_was_never_below() -> None:
    counted = [e["args"]["requests"] for e in trace({"": made_up_run()})["traceEvents"] if e["ph"] == "C"]
    assert counted[-1] == 0
    assert min(counted) == 0 < max(counted)


def test_several_runs_share_a_trace_and_nothing_in_it(tmp_path: Path) -> None:
    runs = {"a": made_up_run(num_requests=5), "b": made_up_run(num_requests=5, is_split=False)}
    document = trace(runs)
    check_format(document)
    assert "requests (a)" in names(document)
    assert "colocated-0 (b)" in names(document)
    write_trace(tmp_path / "t.json", runs)
    assert json.loads((tmp_path / "t.json").read_bytes()) == json.loads(json.dumps(document))
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path / "missing" / "t.json", runs)


def test_the_format_check_finds_what_a_viewer_could_not_nest() -> None:
    document = trace({"": made_up_run(num_requests=5)})
    cut = [event for event in document["traceEvents"] if event["ph"] != "e"]
    with pytest.raises(AssertionError):
        check_format(document | {"traceEvents": cut})


def test_no_requests_make_an_empty_trace() -> None:
    empty = Run(started_at="", duration_s=0.0, requests=(), senders=(), settings={})
    check_format(trace({"": empty}))


@pytest.mark.parametrize("with_timelines", [True, False])
def test_spans_lead_without_a_gap_from_the_intended_time_to_the_first_output(with_timelines: bool) -> None:
    for record in made_up_run(with_timelines=with_timelines).requests:
        if not record.chunks:
            continue
        ahead = [span for span in spans_of(record) if not span.is_beside]
        assert ahead[0].start_s == record.intended_at_s
        assert ahead[-1].end_s == pytest.approx(record.chunks[0].at_s)
        for earlier, later in pairwise(ahead):
            assert later.start_s == pytest.approx(earlier.end_s)


def test_a_request_without_output_waits_to_its_end() -> None:
    record = next(each for each in made_up_run(num_requests=80).requests if each.ending is Ending.REJECTED)
    *_, last = spans_of(record)
    assert (last.name, last.worker, last.end_s) == ("wait", CLIENT, record.ended_at_s)


def test_lanes_never_hold_two_at_once_and_are_as_few_as_there_were_at_once() -> None:
    intervals = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (2.5, 5.0), (4.0, 6.0)]
    assert lanes(intervals) == [0, 1, 1, 2, 0]


def test_the_timelines_data_gives_times_and_names_back() -> None:
    report = made_up_report(num_requests=8, num_runs=1)
    data = timeline_data(report.arms)
    arm, run = report.arms[1], data["arms"][1]["runs"][0]
    for record, found in zip(arm.runs[0].requests, run["requests"], strict=True):
        spans = [found["spans"][n : n + 5] for n in range(0, len(found["spans"]), 5)]
        for span, (stage, worker, start, length, beside) in zip(spans_of(record), spans, strict=True):
            assert (data["stages"][stage], data["workers"][worker]) == (span.name, span.worker)
            assert start / data["units_per_s"] == pytest.approx(span.start_s, abs=1e-5)
            assert length / data["units_per_s"] == pytest.approx(span.end_s - span.start_s, abs=2e-5)
            assert bool(beside) is span.is_beside
        times = [found["first"] + sum(found["gaps"][:n]) for n in range(len(record.chunks))]
        assert times == [round(chunk.at_s * data["units_per_s"]) for chunk in record.chunks]


def test_long_texts_are_cut_in_the_timelines_data() -> None:
    run = made_up_run(num_requests=1)
    long = msgspec.structs.replace(run.requests[0], error=HOSTILE * 100)
    arm = msgspec.structs.replace(
        made_up_report(1, 1).arms[0], runs=(msgspec.structs.replace(run, requests=(long,)),)
    )
    assert len(timeline_data([arm])["arms"][0]["runs"][0]["requests"][0]["error"]) == 200
