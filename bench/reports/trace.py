"""A run in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

Three processes: *requests*, where each is a row of its own (nestable async events, which may overlap as they like);
*workers*, whose stages are slices on as many lanes as they ran at once; *load*, a counter of requests under way. The
format is described in "Trace Event Format" (Google, 2016): https://docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from twinpool.bench.reports.spans import CLIENT, COORDINATOR, Span, lanes, spans_of
from twinpool.bench.serving.record import RequestRecord, Run
from twinpool.errors import ConfigError

_REQUESTS, _LOAD, _FIRST_WORKER = 1, 2, 3
_CATEGORY = "request"


def trace(run: Run) -> dict[str, Any]:
    """The trace as JSON values; times are in microseconds since the run's start, events in order of time."""
    records = sorted(run.requests, key=lambda record: record.intended_at_s)
    events = [event for record in records for event in _request(record)]
    events += _workers(records)
    events += _load(records)
    names = [*_named(_REQUESTS, "requests"), *_named(_LOAD, "load")]
    for pid, worker in enumerate(_on_workers(records), _FIRST_WORKER):
        names += _named(pid, worker)
    # Stable: what begins or ends at one time stays in the order in which it nests.
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {"started_at": run.started_at, "settings": msgspec.to_builtins(run.settings)},
    }


def write_trace(path: Path, run: Run) -> None:
    """Writes the trace as JSON. Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(trace(run)))
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written: {exc.strerror}; name a file in a folder that exists"
        ) from exc


def _request(record: RequestRecord) -> Iterator[dict[str, Any]]:
    """The whole request, and within it its spans, each clipped to it, and its first output."""
    common = {"cat": _CATEGORY, "id": str(record.index), "pid": _REQUESTS, "tid": 0}
    start, end = _us(record.intended_at_s), _us(max(record.ended_at_s, record.intended_at_s))
    name = f"#{record.index} {record.group}".rstrip()
    args = {
        "request_id": record.request_id,
        "ending": record.ending.value,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
    }
    yield {"ph": "b", "name": name, "ts": start, "args": args, **common}
    # Nested events of one id must nest: what runs beside others is on its worker's track alone.
    for span in _one_after_another(record):
        yield {
            "ph": "b",
            "name": span.name,
            "ts": _us(span.start_s),
            "args": {"worker": span.worker},
            **common,
        }
        yield {"ph": "e", "name": span.name, "ts": _us(span.end_s), **common}
    if record.chunks:
        yield {"ph": "n", "name": "first output", "ts": min(_us(record.chunks[0].at_s), end), **common}
    yield {"ph": "e", "name": name, "ts": end, **common}


def _one_after_another(record: RequestRecord) -> Iterator[Span]:
    """The spans, each from where the one before has ended, to no later than the request's end."""
    free_s = record.intended_at_s
    for span in spans_of(record):
        start_s, end_s = max(span.start_s, free_s), min(span.end_s, record.ended_at_s)
        if end_s > start_s:
            yield Span(span.name, start_s, end_s, span.worker, span.is_beside)
            free_s = end_s


def _on_workers(records: list[RequestRecord]) -> dict[str, list[tuple[Span, RequestRecord]]]:
    pairs = [
        (span, record)
        for record in records
        for span in spans_of(record)
        if span.worker not in (CLIENT, COORDINATOR)
    ]
    pairs.sort(key=lambda pair: (pair[0].worker, _us(pair[0].start_s)))
    return {worker: list(own) for worker, own in groupby(pairs, key=lambda pair: pair[0].worker)}


def _workers(records: list[RequestRecord]) -> Iterator[dict[str, Any]]:
    for pid, own in enumerate(_on_workers(records).values(), _FIRST_WORKER):
        taken = lanes([(_us(span.start_s), _us(span.end_s)) for span, _ in own])
        for (span, record), lane in zip(own, taken, strict=True):
            start = _us(span.start_s)
            yield {
                "ph": "X",
                "name": f"{span.name} #{record.index}",
                "cat": span.name,
                "ts": start,
                "dur": _us(span.end_s) - start,
                "pid": pid,
                "tid": lane + 1,
                "args": {"request_id": record.request_id, "group": record.group},
            }


def _named(pid: int, name: str) -> Iterator[dict[str, Any]]:
    """What a process is called, and that it stands in the order of the process ids."""
    common = {"ph": "M", "pid": pid, "tid": 0}
    yield {"name": "process_name", "args": {"name": name}, **common}
    yield {"name": "process_sort_index", "args": {"sort_index": pid}, **common}


def _load(records: list[RequestRecord]) -> Iterator[dict[str, Any]]:
    """How many requests are between their sending and their end."""
    moves = sorted([(_us(r.sent_at_s), 1) for r in records] + [(_us(r.ended_at_s), -1) for r in records])
    running = 0
    for at, change in moves:
        running += change
        yield {
            "ph": "C",
            "name": "requests under way",
            "ts": at,
            "pid": _LOAD,
            "tid": 0,
            "args": {"requests": running},
        }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
