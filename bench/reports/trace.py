"""Runs in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

Of each run there are these processes: *requests*, where each is a row of its own (nestable async events, which may
overlap as they like); *load*, a counter of requests under way; and each worker, whose stages are slices on as many
lanes as they ran at once. The format is described in "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, groupby
from pathlib import Path
from typing import Any

import msgspec

from twinpool.bench.reports.spans import CLIENT, COORDINATOR, Span, lanes, spans_of
from twinpool.bench.serving.record import RequestRecord, Run
from twinpool.errors import ConfigError

_CATEGORY = "request"
Event = dict[str, Any]


def trace(runs: Mapping[str, Run]) -> dict[str, Any]:
    """The trace as JSON values, of runs by their names (of one, its name may be empty). Times are microseconds since
    the start of their run: all runs begin at 0."""
    names: list[Event] = []
    events: list[Event] = []
    pids = count(1)
    for name, run in runs.items():
        records = sorted(run.requests, key=lambda record: record.intended_at_s)
        after = f" ({name})" if name else ""
        pid = next(pids)
        names += _named(pid, f"requests{after}")
        events += (event for record in records for event in _request(record, pid))
        pid = next(pids)
        names += _named(pid, f"load{after}")
        events += _load(records, pid)
        for worker, own in _on_workers(records).items():
            pid = next(pids)
            names += _named(pid, worker + after)
            events += _slices(own, pid)
    # Stable: what begins or ends at one time stays in the order in which it nests.
    events.sort(key=lambda event: event["ts"])
    about = {name: {"started_at": run.started_at, "settings": run.settings} for name, run in runs.items()}
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(path: Path, runs: Mapping[str, Run]) -> None:
    """Writes the trace as JSON. Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(trace(runs)))
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written: {exc.strerror}; name a file in a folder that exists"
        ) from exc


def _request(record: RequestRecord, pid: int) -> Iterator[Event]:
    """The whole request, and within it its spans, each clipped to it, and its first output."""
    common = {"cat": _CATEGORY, "id": f"{pid}.{record.index}", "pid": pid, "tid": 0}
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


def _slices(spans: list[tuple[Span, RequestRecord]], pid: int) -> Iterator[Event]:
    taken = lanes([(_us(span.start_s), _us(span.end_s)) for span, _ in spans])
    for lane in range(max(taken) + 1):
        yield {
            "ph": "M",
            "name": "thread_name",
            "ts": 0,
            "pid": pid,
            "tid": lane + 1,
            "args": {"name": f"lane {lane + 1}"},
        }
    for (span, record), lane in zip(spans, taken, strict=True):
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


def _named(pid: int, name: str) -> Iterator[Event]:
    """What a process is called, and that it stands in the order of the process ids."""
    common = {"ph": "M", "pid": pid, "tid": 0}
    yield {"name": "process_name", "args": {"name": name}, **common}
    yield {"name": "process_sort_index", "args": {"sort_index": pid}, **common}


def _load(records: list[RequestRecord], pid: int) -> Iterator[Event]:
    """How many requests are between their sending and their end."""
    moves = sorted([(_us(r.sent_at_s), 1) for r in records] + [(_us(r.ended_at_s), -1) for r in records])
    running = 0
    for at, change in moves:
        running += change
        yield {
            "ph": "C",
            "name": "requests under way",
            "ts": at,
            "pid": pid,
            "tid": 0,
            "args": {"requests": running},
        }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
